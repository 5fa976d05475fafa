"""Atomic writes, hashes of files, and a lock between processes."""

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from io import BufferedWriter
from pathlib import Path
from typing import Literal

TEMP_SUFFIX = ".tmp"
_LOCK_POLL_S = 0.2


@contextlib.contextmanager
def open_atomic(path: Path, *, sync_parent: bool = True) -> Iterator[BufferedWriter]:
    """Opens a temporary file that takes a name when the ``with`` block succeeds, and is deleted otherwise.

    Whatever happens, the name refers to either the old or the new content, which is on the disk.

    Args:
        sync_parent: Also flush the folder, so that the new name survives a power cut. A caller that writes many
            files does this once with :func:`sync_folder`.

    Raises:
        OSError: The disk is full or read-only. The temporary file has been deleted.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}{TEMP_SUFFIX}")
    try:
        with open(temporary, "xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if sync_parent:
        sync_folder(path.parent)


def write_atomic(path: Path, data: bytes, *, sync_parent: bool = True) -> None:
    """Writes the whole content of a file, see :func:`open_atomic`."""
    with open_atomic(path, sync_parent=sync_parent) as stream:
        stream.write(data)


def link_atomic(link: Path, target: Path) -> None:
    """Puts a symbolic link where there is none, or in place of another, and makes its folder if needed.

    Raises:
        OSError: the folder cannot be written.
    """
    link.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=link.parent) as fresh:
        os.symlink(target, Path(fresh, link.name))
        os.replace(Path(fresh, link.name), link)


def sync_folder(folder: Path) -> None:
    """Flushes the names in a folder to the disk, if the platform supports it."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_temporaries(folder: Path) -> None:
    """Deletes the temporary files and folders that killed writers left in a folder. The caller must hold its lock."""
    for path in list(folder.glob(f".*{TEMP_SUFFIX}")):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def hash_bytes(data: bytes) -> str:
    """Returns the BLAKE2b hash of bytes, 32 hex digits."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def hash_file(path: Path, algorithm: Literal["blake2b", "sha256"] = "blake2b") -> str:
    """Returns a hash of a file's content, BLAKE2b of 32 hex digits or SHA-256 of 64. Reads the file in pieces."""
    digest = hashlib.blake2b(digest_size=16) if algorithm == "blake2b" else hashlib.sha256()
    with open(path, "rb") as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def is_disk_full(error: OSError) -> bool:
    """Tells whether a write failed for lack of space or quota."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


class FolderLock:
    """An advisory lock between processes, which the kernel releases when its holder dies, however it dies.

    On platforms without ``fcntl`` it locks nothing. Writes are still atomic, but two processes may do the same work.
    """

    def __init__(self, path: Path):
        self.path = path

    def _try(self, descriptor: int) -> bool:
        try:
            import fcntl
        except ImportError:
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def is_held(self) -> bool:
        """Tells whether any process holds the lock now."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            return not self._try(descriptor)
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def hold(self, on_wait: Callable[[float], None] = lambda waited_s: None) -> Iterator[None]:
        """Holds the lock during a ``with`` block.

        Args:
            on_wait: called with the seconds waited so far while another process holds the lock; raises to give up.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # The file is never deleted: who waits for it would then lock a file that nobody else can open.
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            start = time.monotonic()
            while not self._try(descriptor):
                on_wait(time.monotonic() - start)
                time.sleep(_LOCK_POLL_S)
            yield
        finally:
            os.close(descriptor)
