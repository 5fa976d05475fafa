"""Origin and conditions of a measurement: machine, versions, commit, configuration, capture."""

import copy
import platform
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from f3rm_ext.html.content import package_versions, processor
from f3rm_ext.utils.atomic_files import hash_bytes
from f3rm_ext.utils.threads import usable_cores

if TYPE_CHECKING:
    from nerfstudio.engine.trainer import TrainerConfig

PACKAGES = ("f3rm-ext", "nerfstudio", "torch", "gsplat", "numpy", "numba", "scipy", "tyro")


def hardware(device_type: str) -> str:
    """Returns the name of a device, such as ``NVIDIA H100 80GB HBM3`` or ``AMD EPYC 7B13, 8 cores``."""
    if device_type == "cuda":
        import torch

        return " + ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    return f"{processor()}, {usable_cores()} cores"


def versions() -> dict[str, str]:
    """Returns the versions of Python, the system, packages that affect speed, and CUDA, as far as they are there."""
    import torch

    system = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    cuda = {"cuda": torch.version.cuda} if torch.version.cuda else {}
    return {**system, **package_versions(PACKAGES), **cuda}


def commit() -> dict[str, Any]:
    """Returns ``commit`` and ``changed`` (whether files differ from it) of this package's code; empty without git."""
    folder = Path(__file__).parent
    try:
        # Fails if the repository is another one, in which the environment lies.
        _git(folder, "ls-files", "--error-unmatch", Path(__file__).name)
        head = _git(folder, "rev-parse", "HEAD")
        return {"commit": head[:12], "changed": bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return {}


def _git(folder: Path, *arguments: str) -> str:
    process = subprocess.run(
        ["git", "-C", str(folder), *arguments], check=True, capture_output=True, text=True, timeout=20
    )
    return process.stdout.strip()


def config_digest(config: "TrainerConfig") -> str:
    """Returns a hash of the options of a run that affect its result: not of paths, names, seeds, viewers and logs."""
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
    return hash_bytes(yaml.dump(config).encode())[:12]


def capture_conditions(pipeline: Any) -> dict[str, Any]:
    """Returns the name, split and sizes of the capture that a pipeline of nerfstudio has loaded."""
    manager = pipeline.datamanager
    train, eval_set = manager.train_dataset, manager.eval_dataset
    data = getattr(manager.config, "data", None) or getattr(getattr(manager.config, "dataparser", None), "data", None)
    names = [sorted(Path(file).name for file in dataset.image_filenames) for dataset in (train, eval_set)]
    cameras = train.cameras
    return {
        **({} if data is None else {"capture": Path(data).resolve().name}),
        "split": hash_bytes("\n".join([*names[0], "", *names[1]]).encode())[:8],
        "train_images": len(names[0]),
        "eval_images": len(names[1]),
        "width_px": int(cameras.width.max()),
        "height_px": int(cameras.height.max()),
    }
