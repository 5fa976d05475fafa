"""Opens a trained run from its config.yml, even after it was moved."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from f3rm_ext.engine.config_file import HINT, read_config
from f3rm_ext.errors import CaptureError, CheckpointError, ConfigError

if TYPE_CHECKING:
    from nerfstudio.engine.trainer import TrainerConfig
    from nerfstudio.pipelines.base_pipeline import Pipeline


class OpenedRun(NamedTuple):
    """A trained run, in evaluation mode."""

    config: "TrainerConfig"
    pipeline: "Pipeline"
    checkpoint: Path
    step: int
    """Last training step in the checkpoint."""


def open_run(
    load_config: Path,
    usable: Callable[["TrainerConfig"], bool],
    lacking: str,
    change: Callable[["TrainerConfig"], None] = lambda config: None,
    step: int | None = None,
) -> OpenedRun:
    """Opens the newest intact checkpoint of a run, or that of a step; warns of damaged ones and skips them.

    Args:
        usable: returns whether a run with these options can be used.
        lacking: end of the error if it cannot, after "is of the method X, ": for instance "which has no splats: give
            a run of sugar-ext".

    Raises:
        ConfigError: the file does not exist or cannot be understood, or the run is not usable.
        CheckpointError: the run has no checkpoint yet, or all are damaged.
        CaptureError: the capture is not where the options say.
    """
    from nerfstudio.utils.rich_utils import CONSOLE

    from f3rm_ext.engine import checkpoint

    config = read_config(load_config)
    folder = checkpoint.folder_of(load_config)
    if not checkpoint.newest_first(folder):
        raise CheckpointError(f"There is no checkpoint in {folder}: train until the first one is saved.")
    if step is None:
        newest = checkpoint.newest_intact(folder, lambda text: CONSOLE.log(text, markup=False))
    else:
        newest = checkpoint.make_path(folder, step)

    # Checkpoints lie next to the config, even if the run was moved or renamed.
    base = folder.resolve().parent
    try:
        _take_registered_datamanager(config, load_config)
        fits = usable(config)
        manager: Any = config.pipeline.datamanager
        data = Path(manager.data or manager.dataparser.data)
        if base.parts[-3:] == (config.experiment_name, config.method_name, config.timestamp):
            config.output_dir = base.parent.parent.parent
    except (AttributeError, TypeError) as error:
        raise ConfigError(f"{load_config} is not understood ({type(error).__name__}): {HINT}.") from error
    if not fits:
        raise ConfigError(f"The run {load_config} is of the method {config.method_name}, {lacking}.")
    if not data.exists():
        raise CaptureError(
            f"The capture {data} of this run is not there: a path in config.yml is relative to the folder in which "
            f"training was started, so run the command there, or correct `data` in {load_config} if the capture moved."
        )
    config.relative_model_dir = config.load_dir = folder.resolve()
    config.load_step = step = checkpoint.parse_step(newest)
    assert step is not None, "newest_first only lists checkpoint names"
    change(config)
    path = config.load_dir / newest.name
    pipeline = _set_up(config, path)
    CONSOLE.print(f":white_check_mark: Done loading checkpoint from {path}", markup=False)
    return OpenedRun(config, pipeline, path, step)


def _take_registered_datamanager(config: "TrainerConfig", load_config: Path) -> None:
    """Takes the datamanager's class from the registered method, as nerfstudio does.

    config.yml cannot name a class that has a type parameter.
    """
    from f3rm_ext.compat import registered_methods

    methods, name = registered_methods(), config.method_name
    if name not in methods:
        from nerfstudio.configs.method_configs import all_methods as methods
    if name is None or name not in methods:
        raise ConfigError(
            f"The run {load_config} is of the method {name}, which is not installed here: install the package that "
            "provides it."
        )
    config.pipeline.datamanager._target = methods[name].pipeline.datamanager._target


def _set_up(config: "TrainerConfig", path: Path) -> "Pipeline":
    """Returns model and capture with the weights of a checkpoint, in evaluation mode.

    Nerfstudio's ``eval_setup`` does the same, but its YAML loader runs code that config.yml names.
    """
    import torch

    from f3rm_ext.compat import default_device_type
    from f3rm_ext.engine import checkpoint

    pipeline = config.pipeline.setup(device=torch.device(default_device_type()), test_mode="test")
    pipeline.eval()
    state = checkpoint.load(path, needed=("step", "pipeline"))
    pipeline.load_pipeline(state["pipeline"], state["step"])
    return pipeline
