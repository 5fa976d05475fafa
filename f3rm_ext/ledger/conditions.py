"""What a measurement was made with and of: machine, versions, commit, configuration, capture."""

import copy
import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from f3rm_ext.html.content import processor
from f3rm_ext.utils.atomic_files import digest_of
from f3rm_ext.utils.threads import usable_cores

if TYPE_CHECKING:
    from nerfstudio.engine.trainer import TrainerConfig

PACKAGES = ("f3rm-ext", "nerfstudio", "torch", "gsplat", "numpy", "numba", "scipy", "tyro")


def hardware(device_type: str) -> str:
    """Returns what a device is called, such as ``NVIDIA H100 80GB HBM3`` or ``AMD EPYC 7B13, 8 cores``.

    Args:
        device_type: ``"cuda"`` or ``"cpu"``.
    """
    if device_type == "cuda":
        import torch

        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return " + ".join(names)
    return f"{processor()}, {usable_cores()} cores"


def versions() -> dict[str, str]:
    """Returns the versions of Python, of packages that decide about speed, and of CUDA; absent where there is none."""
    import torch

    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def commit() -> dict[str, Any]:
    """Returns ``commit`` and ``changed`` (whether files differ from it) of this package's code; empty without git."""
    folder = Path(__file__).parent
    try:
        _git(
            folder, "ls-files", "--error-unmatch", Path(__file__).name
        )  # not the repository that an environment lies in
        head = _git(folder, "rev-parse", "HEAD")
        return {"commit": head[:12], "changed": bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return {}


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], check=True, capture_output=True, text=True, timeout=20
    )
    return done.stdout.strip()


def config_digest(config: "TrainerConfig") -> str:
    """Returns a hash of the options that change what is computed: not of paths, names, seeds, viewers and logs.

    Args:
        config: options of a run; they are not changed.
    """
    import yaml

    config = copy.deepcopy(config)
    for name in ("output_dir", "data", "experiment_name", "project_name", "timestamp", "load_dir", "load_step"):
        setattr(config, name, None)
    for name in ("load_config", "load_checkpoint", "viewer", "logging", "vis", "relative_model_dir"):
        setattr(config, name, None)
    config.machine.seed = 0
    manager = config.pipeline.datamanager
    for owner in (manager, getattr(manager, "dataparser", None)):
        if hasattr(owner, "data"):
            owner.data = None  # type: ignore[union-attr]
    return digest_of(yaml.dump(config).encode())[:12]


def capture_conditions(pipeline: Any) -> dict[str, Any]:
    """Returns the conditions that a pipeline's capture decides: its name, sizes and split.

    Args:
        pipeline: nerfstudio's, built with both of its datasets.
    """
    train, held = pipeline.datamanager.train_dataset, pipeline.datamanager.eval_dataset
    found: dict[str, Any] = {}
    data = getattr(pipeline.datamanager.config, "data", None) or getattr(
        getattr(pipeline.datamanager.config, "dataparser", None), "data", None
    )
    if data is not None:
        found["capture"] = Path(data).resolve().name
    names = [sorted(Path(file).name for file in dataset.image_filenames) for dataset in (train, held)]
    cameras = train.cameras
    return {
        **found,
        "split": digest_of("\n".join([*names[0], "", *names[1]]).encode())[:8],
        "train_images": len(names[0]),
        "eval_images": len(names[1]),
        "width_px": int(cameras.width.max()),
        "height_px": int(cameras.height.max()),
    }
