"""Where weights are looked for, in which order, what is said when they are nowhere, and how they are read."""

import hashlib
import http.server
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants, errors
from safetensors.torch import save_file

from f3rm_ext.errors import ExtractorError, WeightsNotFoundError
from f3rm_ext.features.extractors import weights as module
from f3rm_ext.features.extractors.weights import Weights, file_hash, load_state_dict, locate, resolve, status

HUB = Weights(
    model="Net s8",
    option="weights",
    hub_files=(("org/net", "model.safetensors"), ("org/net", "pytorch_model.bin")),
    urls=("https://example.org/files/net_s8.pth",),
)


REALLY_CHECK = module._check_reachable
Connect = Callable[[Callable[[str], None]], None]


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty caches."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


@pytest.fixture(autouse=True)
def connect_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str], None]], None]:
    """Replaces what finds out whether a server answers; until then, to go on-line fails the test."""

    def connect(check: Callable[[str], None]) -> None:
        monkeypatch.setattr(module, "_check_reachable", check)

    connect(lambda url: pytest.fail(f"went on-line for {url}"))
    return connect


def write(path: Path, content: bytes = b"x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def into_hub_cache(root: Path, name: str) -> Path:
    repository = root / "hub" / "models--org--net"
    write(repository / "refs" / "main", b"abc123")
    return write(repository / "snapshots" / "abc123" / name)


def into_torch_cache(root: Path) -> Path:
    return write(root / "torch" / "hub" / "checkpoints" / "net_s8.pth")


class TestOrder:
    def test_caches_are_searched_from_the_worst_to_the_best(self, caches: Path) -> None:
        assert locate(HUB) is None
        for place in (
            lambda: write(caches / "home" / ".cache" / "clip" / "net_s8.pth"),  # OpenAI's own
            lambda: into_torch_cache(caches),
            lambda: into_hub_cache(caches, "pytorch_model.bin"),
            lambda: into_hub_cache(caches, "model.safetensors"),
        ):
            assert place() == locate(HUB) == resolve(HUB)

    def test_given_path_comes_before_all(self, caches: Path) -> None:
        into_hub_cache(caches, "model.safetensors")
        path = write(caches / "mine.pth")
        assert resolve(Weights("Net", "weights", local=path, hub_files=HUB.hub_files, urls=HUB.urls)) == path

    def test_given_path_that_does_not_exist_is_an_error_even_if_caches_have_it(self, caches: Path) -> None:
        into_hub_cache(caches, "model.safetensors")
        wanted = Weights("Net", "weights", local=caches / "typo.pth", hub_files=HUB.hub_files)
        with pytest.raises(WeightsNotFoundError, match=r"typo\.pth .*weights="):
            resolve(wanted)


class TestMissing:
    def test_offline_error_names_file_places_and_remedy(self, caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        with pytest.raises(WeightsNotFoundError) as caught:
            resolve(HUB)
        message = str(caught.value)
        for part in ("Net s8", "model.safetensors", "huggingface.co/org/net", "net_s8.pth", "weights=PATH"):
            assert part in message
        for place in (caches / "hub", caches / "torch" / "hub" / "checkpoints"):
            assert str(place) in message
        assert "HF_HUB_OFFLINE" in message
        assert "\n" not in message

    def test_status_found_and_missing(self, caches: Path) -> None:
        missing = status(HUB)
        assert (missing.path, missing.missing) == (None, True)
        assert "weights=PATH" in missing.advice
        path = into_torch_cache(caches)
        found = status(HUB)
        assert (found.path, found.missing) == (path, False)
        assert str(path) in found.advice

    def test_no_network(self, connect_with: Connect) -> None:
        def unreachable(url: str) -> None:
            raise OSError("Network is unreachable")

        connect_with(unreachable)
        with pytest.raises(WeightsNotFoundError, match="Network is unreachable"):
            resolve(HUB)


class TestDownload:
    @pytest.fixture(autouse=True)
    def reachable(self, connect_with: Connect) -> None:
        connect_with(lambda url: None)

    @pytest.fixture
    def hub(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., str]], None]:
        """Answers for the hub."""
        return lambda download: monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)

    def test_hub_file_that_a_repository_lacks_is_skipped(self, caches: Path, hub: Callable[..., None]) -> None:
        asked = []

        def download(repository: str, name: str, **options: object) -> str:
            asked.append((repository, name))
            if name == "model.safetensors":
                raise errors.EntryNotFoundError("404")
            return str(caches / name)

        hub(download)
        assert resolve(HUB) == caches / "pytorch_model.bin"
        assert asked == list(HUB.hub_files)

    def test_falls_back_to_the_plain_download(
        self, caches: Path, hub: Callable[..., None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def download(repository: str, name: str, **options: object) -> str:
            raise errors.LocalEntryNotFoundError("no connection")

        fetched = []
        hub(download)
        monkeypatch.setattr(torch.hub, "download_url_to_file", lambda url, path, **_: fetched.append((url, path)))
        path = resolve(HUB)
        assert path == caches / "torch" / "hub" / "checkpoints" / "net_s8.pth"
        assert fetched == [(HUB.urls[0], str(path))]

    def test_gated_or_vanished_repository_is_a_plain_sentence(self, hub: Callable[..., None]) -> None:
        def download(repository: str, name: str, **options: object) -> str:
            raise OSError("401 Unauthorized\nlong explanation")

        hub(download)
        hub_only = Weights("Net", "weights", hub_files=HUB.hub_files)
        with pytest.raises(WeightsNotFoundError, match="401 Unauthorized") as caught:
            resolve(hub_only)
        assert "\n" not in str(caught.value)


class TestRealServer:
    """The plain download against a real server on this machine."""

    @pytest.fixture
    def server(self, caches: Path) -> Iterator[str]:
        folder = caches / "served"
        write(folder / "net.pth", b"weights" * 1000)

        class Handler(http.server.SimpleHTTPRequestHandler):
            def __init__(self, *args, **options) -> None:
                super().__init__(*args, directory=str(folder), **options)

            def log_message(self, format: str, *args: object) -> None:
                pass

        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            yield f"http://127.0.0.1:{server.server_port}"
            server.shutdown()
            thread.join()

    @pytest.fixture(autouse=True)
    def really(self, caches: Path, monkeypatch: pytest.MonkeyPatch, connect_with: Connect) -> None:
        connect_with(REALLY_CHECK)
        for name in list(os.environ):
            if name.lower() in {"http_proxy", "https_proxy", "all_proxy"}:
                monkeypatch.delenv(name)

    def test_fetches_once_and_keeps_the_file(self, server: str, caches: Path) -> None:
        wanted = Weights("Net", "weights", urls=(f"{server}/net.pth",))
        path = resolve(wanted)
        assert path.read_bytes() == b"weights" * 1000
        (caches / "served" / "net.pth").unlink()
        assert resolve(wanted) == path

    def test_next_url_is_tried_and_nothing_half_done_is_left(self, server: str, caches: Path) -> None:
        path = resolve(Weights("Net", "weights", urls=(f"{server}/gone.pth", f"{server}/net.pth")))
        assert [entry.name for entry in path.parent.iterdir()] == ["net.pth"]

    def test_missing_on_the_server(self, server: str) -> None:
        with pytest.raises(WeightsNotFoundError, match="404"):
            resolve(Weights("Net", "weights", urls=(f"{server}/gone.pth",)))

    def test_nobody_listens(self, server: str) -> None:
        with pytest.raises(WeightsNotFoundError, match="download failed"):
            resolve(Weights("Net", "weights", urls=("http://127.0.0.1:9/net.pth",)))


class TestHash:
    def test_is_the_start_of_sha256(self, tmp_path: Path) -> None:
        content = os.urandom(3 << 19)
        path = write(tmp_path / "w", content)
        assert file_hash(path) == hashlib.sha256(content).hexdigest()[:16]

    def test_changed_file_is_hashed_anew(self, tmp_path: Path) -> None:
        path = write(tmp_path / "w", b"one")
        before = file_hash(path)
        path.write_bytes(b"two")
        os.utime(path, ns=(0, 1))
        assert file_hash(path) == hashlib.sha256(b"two").hexdigest()[:16] != before

    def test_unchanged_file_is_read_once(self, tmp_path: Path, watch_calls: Callable[..., Any]) -> None:
        path = write(tmp_path / "w", b"one")
        before = file_hash(path)
        hashes = watch_calls(hashlib, "sha256")
        assert file_hash(path) == before and not hashes


STATE = {"a.weight": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.float16)}


class TestLoading:
    def check(self, path: Path) -> None:
        found = load_state_dict(path)
        assert found.keys() == STATE.keys()
        for name, tensor in STATE.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor)

    @pytest.mark.parametrize(("save", "name"), [(torch.save, "w.pth"), (save_file, "w.safetensors")])
    def test_files_of_both_kinds(self, tmp_path: Path, save: Callable[..., None], name: str) -> None:
        save(STATE, tmp_path / name)
        self.check(tmp_path / name)

    @pytest.mark.parametrize("wrapper", ["state_dict", "model", "teacher"])
    @pytest.mark.parametrize("prefix", ["", "module.", "backbone.", "module.backbone."])
    def test_wrappers_of_training_scripts_are_taken_off(self, tmp_path: Path, wrapper: str, prefix: str) -> None:
        inner = {prefix + name: tensor for name, tensor in STATE.items()}
        torch.save({wrapper: inner, "epoch": 3, "student": {"other": torch.zeros(1)}}, tmp_path / "w.pth")
        self.check(tmp_path / "w.pth")

    @pytest.mark.parametrize("name", ["w.pth", "w.safetensors"])
    @pytest.mark.parametrize("content", [b"", b"not weights at all", b"PK\x03\x04 cut off"])
    def test_damaged_files(self, tmp_path: Path, name: str, content: bytes) -> None:
        with pytest.raises(ExtractorError, match=name) as caught:
            load_state_dict(write(tmp_path / name, content))
        assert "\n" not in str(caught.value)

    def test_truncated_file(self, tmp_path: Path) -> None:
        torch.save(STATE, tmp_path / "w.pth")
        content = (tmp_path / "w.pth").read_bytes()
        with pytest.raises(ExtractorError, match="cannot be read"):
            load_state_dict(write(tmp_path / "w.pth", content[: len(content) // 2]))

    def test_code_in_a_file_is_not_run(self, tmp_path: Path) -> None:
        class Evil:
            def __reduce__(self):
                return os.mkdir, (str(tmp_path / "broken-in"),)

        torch.save({"a": Evil()}, tmp_path / "w.pth")
        with pytest.raises(ExtractorError, match="more than tensors"):
            load_state_dict(tmp_path / "w.pth")
        assert not (tmp_path / "broken-in").exists()

    @pytest.mark.parametrize("content", [{}, {"epoch": 3}, [torch.zeros(1)]])
    def test_other_contents(self, tmp_path: Path, content: object) -> None:
        torch.save(content, tmp_path / "w.pth")
        with pytest.raises(ExtractorError, match="table of tensors"):
            load_state_dict(tmp_path / "w.pth")
