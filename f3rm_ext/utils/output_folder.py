"""A folder of one command's files: each complete or absent, with its provenance, and no other program's touched."""

import io
import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from f3rm_ext import __version__
from f3rm_ext.errors import ConfigError
from f3rm_ext.utils.names import unique_name
from f3rm_ext.utils.output_file import replace_file, write_error, write_file
from f3rm_ext.utils.provenance import PNG_KEY

SUMMARY = "summary.json"
_LONGEST_NAME = 60


def made_by(command: str) -> dict[str, object]:
    """Returns the part of a provenance that names command and version."""
    return {"made_by": f"f3rm-ext {command}", "version": __version__}


def file_names(names: Sequence[str], taken: Sequence[str] = ()) -> list[str]:
    """Makes file names from names that people chose, without suffix, and unique on every file system.

    >>> file_names(["blue mug", "blue/mug", "labels"], taken=["labels"])
    ['blue_mug', 'blue_mug_2', 'labels_2']
    """
    used = {name.casefold() for name in taken}
    unique = []
    for name in names:
        base = re.sub(r"[^\w.-]+", "_", name).strip("._")[:_LONGEST_NAME] or "query"
        unique.append(unique_name(base, lambda name: name.casefold() in used))
        used.add(unique[-1].casefold())
    return unique


def new_folder(path: Path) -> Path:
    """Returns the first of ``path``, ``path-2``, ``path-3`` ... that does not exist."""
    path = Path(os.path.abspath(path)) if path.name in ("", "..") else path  # which have no name to add to
    return path.with_name(unique_name(path.name, lambda name: path.with_name(name).exists(), "-"))


class OutputFolder:
    """A folder that a command writes to.

    ``summary.json`` lists the files that this command wrote, now and before; only those are replaced.

    Args:
        provenance: goes into every file that can hold it; includes :func:`made_by`.

    Raises:
        ConfigError: the folder cannot be written to, or another program wrote its summary.json.
    """

    def __init__(self, folder: Path, provenance: Mapping[str, object]) -> None:
        self.folder, self.provenance = folder, dict(provenance)
        self._text = json.dumps(self.provenance)
        self._ours = self._read_list()
        self._planned: list[str] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe = folder / f".{secrets.token_hex(8)}.tmp"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"The folder {folder} cannot be written to ({error.strerror or error}): choose another one with --out."
            ) from error

    def _read_list(self) -> set[str]:
        """The files that this command wrote before."""
        path = self.folder / SUMMARY
        if not path.exists():
            return set()
        try:
            summary = json.loads(path.read_text(encoding="utf-8"))
            if summary["made_by"] == self.provenance["made_by"]:
                return {SUMMARY, *map(str, summary["files"]), *map(str, summary.get("earlier_files", ()))}
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            pass
        raise ConfigError(
            f"{path} was not written by `{self.provenance['made_by']}` and will not be overwritten: "
            "choose another folder with --out."
        )

    def plan(self, names: Sequence[str]) -> None:
        """Announces the files to be written, and records them in summary.json.

        Raises:
            ConfigError: another program's file is in the place of one.
        """
        for name in names:
            if name not in self._ours and (self.folder / name).exists():
                raise ConfigError(
                    f"{self.folder / name} is there already and was not written by `{self.provenance['made_by']}`: "
                    "move it away, or choose another folder with --out."
                )
        self._planned = sorted(names)
        self.summary({"complete": False})

    def summary(self, content: Mapping[str, object]) -> None:
        """Writes summary.json: the provenance, the content, and the list of files."""
        files = {"files": self._planned, "earlier_files": sorted(self._ours - {SUMMARY, *self._planned})}
        write_file(self.folder / SUMMARY, json.dumps({**self.provenance, **content, **files}, indent=1).encode())

    def png(self, name: str, image: UInt8[np.ndarray, "h w 3"]) -> None:
        """Writes a picture, with the provenance as PNG text."""
        write_file(self.folder / name, png_bytes(image, self._text))

    def npz(self, name: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Writes arrays (compressed), with the provenance in the entry ``provenance``."""
        # Typed for numpy's stubs, which read the first array as allow_pickle.
        everything: dict[str, Any] = {**arrays, "provenance": np.asarray(self._text)}
        with replace_file(self.folder / name) as stream:
            np.savez_compressed(stream, **everything)

    def npy(self, name: str, array: np.ndarray) -> None:
        """Writes one array."""
        stream = io.BytesIO()  # to a file numpy writes past Python, and says less of what went wrong
        np.lib.format.write_array(stream, array, allow_pickle=False)
        write_file(self.folder / name, stream.getvalue())

    def take(self, name: str, temporary: Path) -> None:
        """Moves a finished temporary file of the same folder to its name."""
        try:
            temporary.replace(self.folder / name)
        except OSError as error:
            raise write_error(self.folder / name, error) from error


def png_bytes(image: UInt8[np.ndarray, "h w 3"], provenance: str) -> bytes:
    """Encodes a picture as PNG, with its provenance (JSON) as text."""
    text = PngInfo()
    text.add_itxt(PNG_KEY, provenance)
    stream = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image)).save(stream, "PNG", pnginfo=text)
    return stream.getvalue()
