"""Finds, downloads, hashes and reads the weights of extractors."""

import os
import pickle
import re
import socket
import threading
import urllib.error
import urllib.request
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from f3rm_ext.errors import ExtractorError, WeightsNotFoundError, reason_of
from f3rm_ext.utils.atomic_files import hash_file

CONNECT_TIMEOUT_S, _STALL_TIMEOUT_S = 5.0, 20.0
_HASH_IN_NAME = re.compile(r"-([0-9a-f]{8,})\.")
"""How PyTorch names files by the start of their SHA-256."""
_hashes: dict[tuple[str, int, int], str] = {}


@dataclass(frozen=True)
class Weights:
    """A weights file and the places where it may be found, in the order in which they are tried."""

    model: str
    """Name of the model for messages, e.g. ``DINOv2 vits14``."""
    option: str
    """The extractor's option that takes a local path, e.g. ``weights``."""
    local: Path | None = None
    """Path given by the user. If it is set, no other place is tried."""
    hub_files: tuple[tuple[str, str], ...] = ()
    """Alternatives on the Hugging Face hub as (repository, file name), best first."""
    urls: tuple[str, ...] = ()
    """Alternatives for a plain download, best first; they are kept in torch hub's cache."""
    path_options: str = ""
    """Further options that go with a local path, e.g. ``,tag=openai``."""


@dataclass(frozen=True)
class WeightsStatus:
    """Whether an extractor's weights are on this machine, for ``doctor``. They are neither loaded nor fetched."""

    path: Path | None
    """The file; None if it is missing or the extractor needs no weights."""
    advice: str
    """One sentence that says where the file is or what to do."""
    missing: bool = False


NO_WEIGHTS = WeightsStatus(path=None, advice="Needs no weights.")


def locate(weights: Weights) -> Path | None:
    """Returns the weights file on this machine, or None. Never goes on-line."""
    if weights.local is not None:
        return weights.local if weights.local.is_file() else None
    for repository, name in weights.hub_files:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(repository, name)
        if isinstance(cached, str) and Path(cached).is_file():
            return Path(cached)
    for folder in _plain_download_folders():
        for url in weights.urls:
            path = folder / Path(url).name
            if path.is_file():
                return path
    return None


def status(weights: Weights) -> WeightsStatus:
    path = locate(weights)
    if path is not None:
        return WeightsStatus(path=path, advice=f"Weights found: {path}.")
    return WeightsStatus(path=None, advice=_placement_hint(weights), missing=True)


def resolve(weights: Weights) -> Path:
    """Returns the weights file and downloads it if it is not on this machine.

    Raises:
        WeightsNotFoundError: The file is not on this machine and cannot be downloaded.
    """
    path = locate(weights)
    if path is not None:
        return path
    if weights.local is not None:
        raise WeightsNotFoundError(_placement_hint(weights))
    reason = "HF_HUB_OFFLINE is set"
    if not _offline():
        failures = []
        for fetch, places in ((_fetch_from_hub, weights.hub_files), (_fetch_by_url, weights.urls)):
            try:
                if places:
                    return fetch(weights)
            except (OSError, ValueError, RuntimeError) as error:
                failures.append(reason_of(error))
        reason = "; ".join(dict.fromkeys(failures))
    raise WeightsNotFoundError(f"{_placement_hint(weights).rstrip('.')} (download failed: {reason}).")


def file_hash(path: Path) -> str:
    """Returns the first 16 hex digits of a file's SHA-256.

    The process remembers the hash as long as the file's size and modification time stay the same.
    """
    facts = path.stat()
    key = (str(path.resolve()), facts.st_size, facts.st_mtime_ns)
    if key not in _hashes:
        _hashes[key] = hash_file(path, "sha256")[:16]
    return _hashes[key]


def load_state_dict(path: Path) -> dict[str, Tensor]:
    """Reads the tensors of a weights file by parameter name, from safetensors or from torch with ``weights_only``.

    Wrappers that training scripts put around a state dict (``state_dict``, ``model``, ``teacher``) and the prefixes
    ``module.`` and ``backbone.`` are removed.

    Raises:
        ExtractorError: The file is damaged or holds anything other than tensors.
    """
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            content = load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise _unreadable(path, "it is damaged or holds more than tensors") from error
    except (OSError, ValueError, RuntimeError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise _unreadable(path, reason_of(error)) from error
    except Exception as error:
        # By name, because the class of its own that safetensors raises is imported only where such a file is read.
        if type(error).__module__.startswith("safetensors"):
            raise _unreadable(path, reason_of(error)) from error
        raise
    for wrapper in ("state_dict", "teacher", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
    if not isinstance(content, Mapping) or not content or not all(isinstance(v, Tensor) for v in content.values()):
        raise _unreadable(path, "it is not a table of tensors")
    state = {str(name): tensor for name, tensor in content.items()}
    for prefix in ("module.", "backbone."):
        if any(name.startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    return state


def explain_misfit(expected: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> str:
    """Returns what keeps weights from being those of a model whose state dict is given, such as "lack parameters
    (norm.weight)"; an empty string if nothing does."""
    missing, unknown = sorted(expected.keys() - state.keys()), sorted(state.keys() - expected.keys())
    misfits = sorted(name for name in expected.keys() & state.keys() if expected[name].shape != state[name].shape)
    for names, problem in ((missing, "lack"), (unknown, "hold unknown"), (misfits, "hold ill-fitting")):
        if names:
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            return f"{problem} parameters ({', '.join(names[:4])}{more})"
    return ""


def _unreadable(path: Path, reason: str) -> ExtractorError:
    return ExtractorError(
        f"The weights file {path} cannot be read as a state dict ({reason}): fetch it again or give another file."
    )


def _offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE) or os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}


def _plain_download_folders() -> tuple[Path, ...]:
    """Returns torch hub's folder of checkpoints and the folder of OpenAI's own CLIP package."""
    return Path(torch.hub.get_dir()) / "checkpoints", Path("~/.cache/clip").expanduser()


def _placement_hint(weights: Weights) -> str:
    if weights.local is not None:
        return f"The weights file {weights.local} of {weights.model} does not exist: correct {weights.option}=."
    names, places = [], []
    if weights.hub_files:
        from huggingface_hub import constants

        repository, name = weights.hub_files[0]
        names.append(f"{name} of huggingface.co/{repository}")
        places.append(f"the Hugging Face cache {constants.HF_HUB_CACHE}")
    if weights.urls:
        names.append(Path(weights.urls[0]).name)
        places.append(f"torch hub's cache {_plain_download_folders()[0]}")
    return (
        f"The weights of {weights.model} ({' or '.join(names)}) are not in {' nor in '.join(places)}: "
        f"download the file where there is a network and give its path by {weights.option}=PATH{weights.path_options}."
    )


def _check_reachable(url: str) -> None:
    """Raises OSError within seconds if there is no network, where the hub's libraries would retry for long."""
    problem: list[Exception] = [TimeoutError("no answer")]

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=CONNECT_TIMEOUT_S).close()
            problem.clear()
        except urllib.error.HTTPError as answer:
            # Any answer means that the server can be reached; the download tells whether it has the file.
            answer.close()
            problem.clear()
        except (OSError, ValueError) as error:
            problem[:] = [error]

    # In a thread, since no time-out covers the lookup of the host name.
    thread = threading.Thread(target=ask, daemon=True, name="f3rm-ext-network")
    thread.start()
    thread.join(2 * CONNECT_TIMEOUT_S)
    if problem:
        raise problem[0]


def _fetch_from_hub(weights: Weights) -> Path:
    from huggingface_hub import constants, errors, hf_hub_download

    reason = "no file on the hub"
    _check_reachable(constants.ENDPOINT)
    for repository, name in weights.hub_files:
        try:
            return Path(hf_hub_download(repository, name, etag_timeout=CONNECT_TIMEOUT_S))
        except errors.LocalEntryNotFoundError as error:
            # The hub cannot be reached, so the other names would fail too.
            raise OSError(reason_of(error)) from error
        except errors.EntryNotFoundError as error:
            reason = reason_of(error)
    raise FileNotFoundError(reason)


def _fetch_by_url(weights: Weights) -> Path:
    folder = _plain_download_folders()[0]
    reason: OSError = FileNotFoundError("no plain download")
    time_limit_s = socket.getdefaulttimeout()
    for url in weights.urls:
        path = folder / Path(url).name
        stated = _HASH_IN_NAME.search(path.name)
        try:
            _check_reachable(url)
            folder.mkdir(parents=True, exist_ok=True)
            socket.setdefaulttimeout(_STALL_TIMEOUT_S)
            torch.hub.download_url_to_file(url, str(path), hash_prefix=stated and stated[1])
            return path
        except OSError as error:
            reason = error
        finally:
            socket.setdefaulttimeout(time_limit_s)
    raise reason
