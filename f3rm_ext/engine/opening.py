"""A trained run opened again from its config.yml, wherever it was moved to."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from f3rm_ext.errors import CheckpointError, ConfigError, UserError

if TYPE_CHECKING:
    from nerfstudio.engine.trainer import TrainerConfig
    from nerfstudio.pipelines.base_pipeline import Pipeline


class Opened(NamedTuple):
    """A run, in evaluation mode."""

    config: "TrainerConfig"
    """Its options."""
    pipeline: "Pipeline"
    """Model and capture."""
    checkpoint: Path
    """The file that was loaded."""
    step: int
    """Number of the last training step in it."""

    def describe(self) -> dict[str, object]:
        """Where results come from, for files that hold them."""
        return {"checkpoint": str(self.checkpoint.resolve()), "step": self.step, "method": self.config.method_name}


def open_run(
    load_config: Path,
    usable: Callable[["TrainerConfig"], bool],
    lacking: str,
    change: Callable[["TrainerConfig"], None] = lambda config: None,
) -> Opened:
    """Opens the newest intact checkpoint of a run; damaged ones are passed over with a warning.

    Args:
        load_config: its config.yml.
        usable: whether a run of these options is one that is wanted.
        lacking: for the sentence to the user where it is not, after "is of the method X, ": "which has no splats: give
            a run of sugar-ext".
        change: what to change in the options before the run is opened.

    Raises:
        ConfigError: there is no such file, it cannot be understood, or the run is not usable.
        CheckpointError: it has no checkpoint yet, or all are damaged.
    """
    from nerfstudio.utils.eval_utils import eval_setup
    from nerfstudio.utils.rich_utils import CONSOLE

    from f3rm_ext.engine import checkpoint

    if not load_config.is_file():
        raise ConfigError(f"There is no file {load_config}: give the config.yml of a run, which ns-train has written.")
    folder = load_config.parent / "nerfstudio_models"
    if not checkpoint.newest_first(folder):
        raise CheckpointError(f"There is no checkpoint in {folder}: train until the first one is saved.")
    newest, damaged = checkpoint.newest_intact(folder)
    if damaged:
        CONSOLE.log(checkpoint.warning_about(damaged, newest), markup=False)

    understood = False

    def stay(config: "TrainerConfig") -> "TrainerConfig":
        """Checkpoints lie beside the config, wherever the run was moved to and whatever it is called now."""
        nonlocal understood
        understood = True
        if not usable(config):
            raise ConfigError(f"The run {load_config} is of the method {config.method_name}, {lacking}.")
        base = folder.resolve().parent
        if base.parts[-3:] == (config.experiment_name, config.method_name, config.timestamp):
            config.output_dir = base.parent.parent.parent
        config.relative_model_dir = folder.resolve()
        config.load_step = checkpoint.step_of(newest)
        change(config)
        return config

    try:
        config, pipeline, path, step = eval_setup(load_config, test_mode="test", update_config_callback=stay)
    except Exception as error:
        if understood or isinstance(error, UserError):
            raise
        raise ConfigError(
            f"{load_config} is not understood ({type(error).__name__}): give the config.yml of a run, made by a method "
            "that is installed here."
        ) from error
    return Opened(config, pipeline, path, step)
