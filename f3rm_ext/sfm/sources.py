"""Original photos or a video of a capture, copied to its folder with what is known about each picture."""

import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from f3rm_ext.capture.checks import require_images
from f3rm_ext.capture.images import name_some
from f3rm_ext.errors import CaptureError
from f3rm_ext.sfm import quality, video
from f3rm_ext.sfm.config import ProcessConfig
from f3rm_ext.sfm.photos import capture_names, find_masks, find_photos, read_mask, read_photo
from f3rm_ext.sfm.work_folder import WorkFolder, file_stamp
from f3rm_ext.utils import threads
from f3rm_ext.utils.console import StageProgress

READING, FRAMES = "Reading photos", "Reading the video"
_FEW_PHOTOS = 8
_SAVE_EVERY = 16
_FRAME_QUALITY = 95


@dataclass(frozen=True)
class Source:
    """An original photo."""

    path: Path
    mask: Path | None = None

    @property
    def stamp(self) -> str:
        """A text that changes with the photo or its mask."""
        return " ".join(file_stamp(path) for path in (self.path, self.mask) if path is not None)


def find_sources(config: ProcessConfig, say: Callable[[str], None]) -> dict[str, Source]:
    """Returns the original photos by their name in the capture, without suffix; none for a video. Raises CaptureError
    if there are fewer than two photos, or one has no mask."""
    if config.images is None:
        return {}
    paths = find_photos(config.images, say)
    require_images(len(paths), config.images)
    masks = {} if config.masks is None else find_masks(config.masks, paths, config.images)
    sources = [Source(path, masks.get(path)) for path in paths]
    return dict(zip(capture_names(paths, config.images), sources, strict=True))


def write_frames(
    work: WorkFolder, path: Path, config: ProcessConfig, show: StageProgress, say: Callable[[str], None]
) -> dict[str, Source]:
    """Writes the sharpest frames of a video, unless an earlier call did. Returns them by name without suffix.

    Of frames between which the camera hardly moves only the first stays.
    """
    origin = {"stamp": file_stamp(path), "num_frames": config.num_frames, "max_size": config.max_size}
    known = work.state.get("video", {})
    frames = [work.images / name for name in known.get("frames", ())]
    if known.get("wanted") != origin or not all(frame.is_file() for frame in frames):
        frames, small = [], []
        for image in video.sharpest_frames(path, config.num_frames, partial(show, FRAMES)):
            if config.max_size:
                image.thumbnail((config.max_size, config.max_size), Image.Resampling.LANCZOS)
            stream = io.BytesIO()
            image.save(stream, "JPEG", quality=_FRAME_QUALITY, subsampling=0)
            frames.append(work.images / f"frame_{len(frames) + 1:05d}.jpg")
            work.write(frames[-1], stream.getvalue())
            image.thumbnail((video.SMALL_PX, video.SMALL_PX))
            small.append(np.asarray(image.convert("L")))
        require_images(len(frames), path)
        selection = [frames[position] for position in video.select_frames(small)]
        if len(selection) < len(frames):
            say(f"{len(selection)} of {len(frames)} frames are used: the camera hardly moves between the others.")
        for frame in set(frames) - set(selection):
            frame.unlink()
        frames = selection
        work.save(video={"wanted": origin, "frames": [frame.name for frame in frames]})
    return {frame.stem: Source(frame) for frame in frames}


def copy_photos(
    work: WorkFolder, sources: dict[str, Source], max_size: int, show: StageProgress, say: Callable[[str], None]
) -> None:
    """Copies the photos that the capture does not have, reduced if too large, and saves what is known about them.
    Raises CaptureError if fewer than two photos can be read."""

    def copy(stem: str) -> tuple[str, dict[str, Any]] | str:
        try:
            return _copy(work, stem, sources[stem], max_size)
        except CaptureError as error:
            return str(error)

    def save() -> None:
        """Adds the new photos to the state, in the order of the sources."""
        known = {Path(name).stem: (name, values) for name, values in {**work.photos, **fresh}.items()}
        work.save(photos=dict(known[stem] for stem in sources if stem in known))

    stems = {Path(name).stem for name in work.photos if (work.images / name).is_file()}
    todo = [stem for stem in sources if stem not in stems]
    unreadable: dict[str, str] = {}
    fresh: dict[str, dict[str, Any]] = {}
    show(READING, len(stems), len(sources))
    with ThreadPoolExecutor(threads.usable_cores()) as pool:
        for number, (stem, photo) in enumerate(zip(todo, pool.map(copy, todo), strict=True), 1):
            if isinstance(photo, str):
                unreadable[str(sources[stem].path)] = photo
            else:
                fresh[photo[0]] = photo[1]
            show(READING, len(stems) + number, len(sources))
            if number % _SAVE_EVERY == 0:  # a call that is stopped keeps the photos that it has read
                save()
    work.state["unreadable"] = unreadable
    save()
    for sentence in unreadable.values():
        say(f"Left out: {sentence}")
    if unreadable and len(work.photos) < 2:
        raise CaptureError(
            f"{len(unreadable)} of {len(sources)} photos cannot be read ({name_some(list(unreadable))}), and a "
            "scene needs at least two: export them again as JPEG."
        )
    if len(work.photos) < _FEW_PHOTOS:
        say(f"{len(work.photos)} photos are very few: 50 or more that overlap their neighbours work well.")


def _copy(work: WorkFolder, stem: str, source: Source, max_size: int) -> tuple[str, dict[str, Any]]:
    """Writes a photo and its masks. Returns its name and its properties."""
    photo = read_photo(source.path, max_size)
    name = f"{stem}{photo.suffix}"
    keep = photo.alpha
    if source.mask is not None:
        mask = read_mask(source.mask, source.path, photo)
        work.write(work.masks / f"{stem}.png", _png(mask))
        keep = mask if keep is None else keep & mask
    if keep is not None:
        work.write(work.feature_masks / f"{name}.png", _png(keep))
    if source.path != work.images / name:
        work.write(work.images / name, photo.data)
    return name, {
        "source": str(source.path),
        "size": [photo.width, photo.height],
        "camera": photo.camera,
        "turned": photo.turned,
        "blur": round(quality.measure_blur(photo.grey), 3),
        "fingerprint": quality.make_fingerprint(photo.grey).hex(),
        "stamp": source.stamp,
        **({} if photo.focal_px is None else {"focal_px": photo.focal_px}),
    }


def _png(keep: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.where(keep, 255, 0).astype(np.uint8)).save(stream, "PNG")
    return stream.getvalue()
