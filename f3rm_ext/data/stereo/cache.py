"""What stereo finds in the photos of a capture: found once, then read from a file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs

from f3rm_ext.utils.atomic_files import FolderLock, hash_bytes, write_atomic
from f3rm_ext.utils.console import console

Result = TypeVar("Result")


def capture_key(outputs: DataparserOutputs, settings: Any) -> str:
    """Identifies settings, cameras and files, so that other poses, photos or masks are another capture."""
    cameras = outputs.cameras
    tensors = [cameras.camera_to_worlds, cameras.fx, cameras.fy, cameras.cx, cameras.cy, cameras.camera_type]
    if cameras.distortion_params is not None:
        tensors.append(cameras.distortion_params)
    files = [*outputs.image_filenames, *(outputs.mask_filenames or [])]
    facts = {
        "settings": settings,
        "cameras": [hash_bytes(tensor.cpu().contiguous().numpy().tobytes()) for tensor in tensors],
        "files": [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files],
    }
    return hash_bytes(json.dumps(facts).encode())


def read_or_make(
    path: Path, make: Callable[[], Result], *, read: Callable[[Path], Result], encode: Callable[[Result], bytes]
) -> tuple[Result, Path | None]:
    """Returns what a file holds, made and written first if there is none. A folder that cannot be written is told in a
    line, and nothing is kept.

    Returns:
        The result, and the path if it was there before.
    """
    result = None
    try:
        if not path.is_file():  # a file is read without the lock, which a folder that cannot be written refuses
            path.parent.mkdir(parents=True, exist_ok=True)
            # Of several processes one works, and the others read what it has written.
            with FolderLock(path.parent / f"{path.stem}.lock").hold():
                if not path.is_file():
                    result = make()
                    write_atomic(path, encode(result))
                    return result, None
        return read(path), path
    except OSError as error:
        console().log(f"Nothing is kept, as {path.parent} cannot be written ({error.strerror}).", markup=False)
    return make() if result is None else result, None
