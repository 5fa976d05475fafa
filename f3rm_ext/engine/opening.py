"""A trained run opened again from its config.yml, wherever it was moved to."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from f3rm_ext.engine.config_file import HINT, read_config
from f3rm_ext.errors import CheckpointError, ConfigError

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

    config = read_config(load_config)
    # Checkpoints lie beside the config, wherever the run was moved to and whatever it is called now.
    base = folder.resolve().parent
    try:
        _take_registered_datamanager(config, load_config)
        fits = usable(config)
        if base.parts[-3:] == (config.experiment_name, config.method_name, config.timestamp):
            config.output_dir = base.parent.parent.parent
    except (AttributeError, TypeError) as error:
        raise ConfigError(f"{load_config} is not understood ({type(error).__name__}): {HINT}.") from error
    if not fits:
        raise ConfigError(f"The run {load_config} is of the method {config.method_name}, {lacking}.")
    config.relative_model_dir = config.load_dir = folder.resolve()
    config.load_step = step = checkpoint.step_of(newest)
    assert step is not None, "files of other names are not looked at"
    change(config)
    path = config.load_dir / newest.name
    pipeline = _set_up(config, path)
    CONSOLE.print(f":white_check_mark: Done loading checkpoint from {path}")
    return Opened(config, pipeline, path, step)


def _take_registered_datamanager(config: "TrainerConfig", load_config: Path) -> None:
    """As nerfstudio does: config.yml cannot name the class where it has a type parameter."""
    from nerfstudio.configs.method_configs import all_methods

    if config.method_name not in all_methods:
        raise ConfigError(
            f"The run {load_config} is of the method {config.method_name}, which is not installed here: install the "
            "package that has it."
        )
    config.pipeline.datamanager._target = all_methods[config.method_name].pipeline.datamanager._target


def _set_up(config: "TrainerConfig", path: Path) -> "Pipeline":
    """Model and capture with the weights of a checkpoint, in evaluation mode.

    Nerfstudio's ``eval_setup`` does the same, but reads config.yml by a loader that runs what the file names.
    """
    import torch

    from f3rm_ext.compat import default_device_type
    from f3rm_ext.engine import checkpoint

    pipeline = config.pipeline.setup(device=torch.device(default_device_type()), test_mode="test")
    pipeline.eval()
    state = checkpoint.load(path, needed=("step", "pipeline"))
    pipeline.load_pipeline(state["pipeline"], state["step"])
    return pipeline
