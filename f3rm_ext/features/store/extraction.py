"""Extracts the features that a store lacks: resumable, with a progress bar, one process at a time."""

import contextlib
import errno
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float16

from f3rm_ext.errors import ExtractorError, FeatureStoreError
from f3rm_ext.features.base import Extractor, FileExtractor, PatchGrid
from f3rm_ext.features.store.feature_store import FeatureStore, shard_bytes
from f3rm_ext.features.store.images import Decoded, ImageSet, decode
from f3rm_ext.features.store.manifest import EXTRACT
from f3rm_ext.profiling.memory import readable
from f3rm_ext.utils.atomic_files import FolderLock, is_disk_full
from f3rm_ext.utils.console import console, image_progress

_SPARE_BYTES = 64 << 20
_WAIT_POLL_S = 0.5
_WAIT_LOG_S = 30.0
_ABANDONED_S = 600.0


@contextlib.contextmanager
def disk_errors(folder: Path, needed_bytes: Callable[[], int]) -> Iterator[None]:
    """Turns errors of a full or read-only disk into a FeatureStoreError, which names the space still needed."""
    try:
        yield
    except OSError as error:
        if is_disk_full(error):
            raise FeatureStoreError(
                f"The disk is full while features are written to {folder}: about {readable(needed_bytes())} more are "
                "needed there; free some space or choose another folder with --features.cache-dir, then run the same "
                "command again (finished images are kept)."
            ) from error
        if isinstance(error, PermissionError) or error.errno == errno.EROFS:
            raise FeatureStoreError(
                f"The feature store {folder} cannot be written ({error.strerror}): make it writable, or choose "
                "another folder with --features.cache-dir or $F3RM_EXT_CACHE."
            ) from error
        raise


def pending(store: FeatureStore, sets: Sequence[ImageSet], *, repair: bool) -> list[tuple[ImageSet, int]]:
    """Returns the images that have no features or whose key is unknown, as (set, index).

    Args:
        sets: Images. Unknown keys are not computed.
        repair: Read every shard whole and count damaged ones as missing. Otherwise check only the size of a shard
            and raise if it is wrong.

    Raises:
        FeatureStoreError: A shard is damaged, without ``repair``.
    """
    todo: list[tuple[ImageSet, int]] = []
    seen: set[str] = set()
    for image_set in sets:
        for i, key in enumerate(image_set.known_keys()):
            if key is None:
                todo.append((image_set, i))
            elif key not in seen:
                seen.add(key)
                if not _is_there(store, key, repair=repair):
                    todo.append((image_set, i))
    return todo


def _is_there(store: FeatureStore, key: str, *, repair: bool) -> bool:
    """Tells whether an image has features; with ``repair``, drops a damaged shard from the manifest."""
    if key not in store:
        return False
    if not repair:
        state = store.state(key)
        if state == "damaged":
            store.require((key,))
        return state == "present"
    damage = store.damage(key)
    if damage is not None:
        console().print(f"[yellow]{damage.path.name} {damage.reason}; extracting it again.", highlight=False)
        del store.manifest.images[key]
    return damage is None


def extract_missing(
    extractor: Extractor,
    store: FeatureStore,
    sets: Sequence[ImageSet],
    *,
    name: str,
    repair: bool = False,
    missing: Sequence[tuple[ImageSet, int]] | None = None,
    show: bool = True,
) -> int:
    """Extracts the features that a store lacks. The caller must hold the store's lock.

    Every batch is committed to the store, so that a killed process loses one batch at most. Threads decode images
    while the extractor works; memory holds two batches of images.

    Args:
        store: Where the features go; opened after the lock was taken.
        sets: Images. Images with the same pixels are extracted once.
        repair: See :func:`pending`.
        missing: Images to extract, if not all that the store lacks: this process's share.

    Returns:
        Number of images extracted.

    Raises:
        FeatureStoreError: The disk is full (or would be) or read-only.
        ExtractorError: The extractor breaks its contract.
    """
    todo = pending(store, sets, repair=repair) if missing is None else list(missing)
    count = 0

    def needed_bytes() -> int:
        return sum(_shard_bytes(extractor, image_set, i) for image_set, i in todo[count:])

    with disk_errors(store.root, needed_bytes):
        store.recover()
        if not todo:
            return 0
        _check_space(store.root, needed_bytes())
        batch: dict[str, Decoded] = {}
        extracted = 0
        with (
            image_progress(disable=not show) as progress,
            contextlib.closing(decode(todo, ahead=extractor.batch_size)) as images,
        ):
            task = progress.add_task(f"Features {name}", total=len(todo))
            try:
                for number, (_, _, image) in enumerate(images, start=1):
                    # Images with the same pixels share a key, which is known only now that they are decoded.
                    if image.key not in batch and not _is_there(store, image.key, repair=repair):
                        batch[image.key] = image
                    if len(batch) >= max(1, extractor.batch_size) or (batch and number == len(todo)):
                        _extract_batch(extractor, store, list(batch.values()))
                        extracted += len(batch)
                        batch.clear()
                        sets[0].index.save(now=False)
                        count = number
                    progress.update(task, completed=number - len(batch))
            except KeyboardInterrupt:
                progress.console.print(
                    f"Stopped: {count} of {len(todo)} images are done and kept in {store.root}; "
                    "run the same command again to go on.",
                    highlight=False,
                )
                raise
            finally:
                sets[0].index.save()
    return extracted


def _extract_batch(extractor: Extractor, store: FeatureStore, batch: Sequence[Decoded]) -> None:
    pixels = [image.pixels for image in batch]
    if isinstance(extractor, FileExtractor):
        maps = extractor.extract_files(pixels, [image.file for image in batch])
    else:
        maps = extractor.extract(pixels)
    if len(maps) != len(batch):
        raise ExtractorError(f"Extractor {extractor.identity.extractor} gave {len(maps)} maps for {len(batch)} images.")
    try:
        for image, values in zip(batch, maps, strict=True):
            height_px, width_px = image.pixels.shape[:2]
            grid = extractor.patch_grid(height_px, width_px)
            store.put(image.key, _to_half(extractor, values, grid), grid, (height_px, width_px))
    finally:
        # After a failure too: shards that are on the disk already are kept.
        store.commit()


def _to_half(extractor: Extractor, values: torch.Tensor, grid: PatchGrid) -> Float16[np.ndarray, "rows cols feat"]:
    who = extractor.identity.extractor
    if tuple(values.shape) != (grid.rows, grid.cols, extractor.dim):
        raise ExtractorError(
            f"Extractor {who} gave features of shape {tuple(values.shape)} where its patch grid and dimension say "
            f"{(grid.rows, grid.cols, extractor.dim)}: report this to its author."
        )
    half = values.detach().to("cpu", torch.float16).numpy()
    if not np.isfinite(half).all():
        raise ExtractorError(
            f"Extractor {who} gave features that are not finite in half precision: its weights are damaged, "
            "or its values exceed 65504."
        )
    return half


def _shard_bytes(extractor: Extractor, image_set: ImageSet, i: int) -> int:
    try:
        grid = extractor.patch_grid(*image_set.size_px(i))
    except ExtractorError as error:
        raise ExtractorError(f"{image_set.name(i)}: {error}") from error
    return shard_bytes(grid.rows, grid.cols, extractor.dim)


def _check_space(folder: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed_bytes > free:
        raise FeatureStoreError(
            f"The features need about {readable(needed_bytes)} but only {readable(free)} are free in {folder}: free "
            "some space, choose another folder with --features.cache-dir, or use fewer or smaller images."
        )
    if needed_bytes + _SPARE_BYTES > free * 0.9:
        console().print(
            f"[yellow]The features need about {readable(needed_bytes)} of the {readable(free)} left in {folder}.",
            highlight=False,
        )


def say_waiting(root: Path, what: str) -> Callable[[float], None]:
    """Returns a callback that takes the seconds waited for ``what`` so far and says so every 30 seconds."""
    log_s = -_WAIT_LOG_S

    def say(waited_s: float) -> None:
        nonlocal log_s
        if waited_s - log_s >= _WAIT_LOG_S:
            log_s = waited_s
            console().print(f"Waiting for {what} to finish the features in {root} ({waited_s:.0f} s).", highlight=False)

    return say


def wait_until(complete: Callable[[], bool], lock: FolderLock, say: Callable[[float], None]) -> None:
    """Waits until another process has completed a store.

    Polls files, because a collective operation of torch.distributed could time out.

    Args:
        lock: Lock that the other process holds while it works.
        say: Called with the seconds waited so far.

    Raises:
        FeatureStoreError: No process is working on the store.
    """
    start = alive_s = time.monotonic()
    while not complete():
        now = time.monotonic()
        if lock.is_held():
            alive_s = now
        elif now - alive_s > _ABANDONED_S:
            raise FeatureStoreError(
                f"The features in {lock.path.parent} are not complete and nobody has worked on them for "
                f"{_ABANDONED_S:.0f} s: the process of rank 0 has failed (see its message); {EXTRACT} "
                "before training."
            )
        say(now - start)
        time.sleep(_WAIT_POLL_S)
