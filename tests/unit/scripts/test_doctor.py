"""The doctor: what it finds, what it advises, and that nothing it looks at can stop it."""

import importlib.metadata
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from f3rm_ext.nerf import hash_backends
from f3rm_ext.scripts import doctor
from f3rm_ext.scripts.doctor import Doctor, Finding, Verdict


def by_name(check: Callable[[], Iterator[Finding]]) -> dict[str, Finding]:
    return {finding.name: finding for finding in check()}


class TestPackages:
    def test_versions(self) -> None:
        found = by_name(doctor.check_packages)
        assert found["torch"] == Finding("packages", "torch", Verdict.OK, importlib.metadata.version("torch"))
        assert found["nerfstudio"].status.startswith("1.1.")

    @pytest.mark.parametrize(
        ("name", "verdict"), [("gsplat", Verdict.ABSENT), ("tinycudann", Verdict.ABSENT), ("torch", Verdict.BROKEN)]
    )
    def test_what_is_not_installed(self, monkeypatch: pytest.MonkeyPatch, name: str, verdict: Verdict) -> None:
        real = importlib.metadata.version

        def version(wanted: str) -> str:
            if wanted == name:
                raise importlib.metadata.PackageNotFoundError(name)
            return real(wanted)

        monkeypatch.setattr(importlib.metadata, "version", version)
        finding = by_name(doctor.check_packages)[name]
        assert finding.verdict is verdict and finding.status == "not installed" and finding.advice
        assert name != "gsplat" or "sugar-ext on CUDA" in finding.advice


def test_open3d(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = by_name(doctor.check_open3d)["open3d"]
    assert finding.verdict is Verdict.OK and "libusb" in finding.status
    monkeypatch.setitem(sys.modules, "open3d", None)  # type: ignore[arg-type]
    finding = by_name(doctor.check_open3d)["open3d"]
    assert finding.verdict is Verdict.ABSENT and "libusb-package" in finding.advice


def test_gpu_and_its_memory(
    monkeypatch: pytest.MonkeyPatch,
    pretend_gpus: Callable[[int], None],
    set_gpu_memory: Callable[..., None],
) -> None:
    pretend_gpus(1)
    properties = SimpleNamespace(name="GPU X", total_memory=24 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    set_gpu_memory(20 << 30, 24 << 30)
    assert by_name(doctor.check_devices)["cuda:0"].status == "GPU X, 24.0 GiB, 20.0 GiB free"


def test_threading_layer_that_two_threads_cannot_share(monkeypatch: pytest.MonkeyPatch) -> None:
    assert by_name(doctor.check_threads)["threads"].status == doctor.threads.describe()
    for layer in ("tbb", "omp"):
        monkeypatch.setitem(sys.modules, f"numba.np.ufunc.{layer}pool", None)  # type: ignore[arg-type]
    found = by_name(doctor.check_threads)["threads"]
    assert found.verdict is Verdict.ABSENT and "(workqueue)" in found.status and "libgomp1" in found.advice


class TestBackends:
    def test_without_optional_ones(self, monkeypatch: pytest.MonkeyPatch, pretend_gpus: Callable[[int], None]) -> None:
        pretend_gpus(0)
        for name in ("tinycudann", "triton", "gsplat", "gsplat.strategy"):
            monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
        found = by_name(doctor.check_backends)
        assert found["hash grid (torch, numba)"].verdict is Verdict.OK
        assert found["hash grid (tcnn)"].verdict is Verdict.ABSENT
        assert found["hash grid (triton)"].verdict is Verdict.ABSENT
        assert found["gsplat"].verdict is Verdict.ABSENT and "sugar-ext on CUDA" in found["gsplat"].advice

    @pytest.mark.parametrize(
        ("reasons", "taken"),
        [
            ({}, "tcnn"),
            ({"tcnn": "it is built for another GPU"}, "triton"),
            ({"tcnn": "it is not installed", "triton": "no C compiler"}, "torch"),
        ],
    )
    def test_which_hash_grid_a_gpu_gets_and_why(
        self, reasons: dict[str, str], taken: str, gpu: pytest.MonkeyPatch
    ) -> None:
        gpu.setattr(hash_backends, "try_backend", lambda name, device: reasons.get(name))
        found = by_name(doctor.check_backends)
        for name in ("tcnn", "triton"):
            finding = found[f"hash grid ({name})"]
            if name in reasons:
                assert finding.verdict is Verdict.ABSENT and finding.status == reasons[name]
                assert f"`auto` takes {taken}" in finding.advice
            else:
                assert finding.verdict is Verdict.OK and finding.status.startswith("works on cuda:0; ")
                assert ("`auto` takes it" in finding.status) == (name == taken)
        assert ("C compiler such as gcc" in found["hash grid (triton)"].advice) == (taken == "torch")

    @pytest.fixture
    def gpu(self, monkeypatch: pytest.MonkeyPatch, pretend_gpus: Callable[[int], None]) -> pytest.MonkeyPatch:
        """A GPU, for which gsplat has no compiled kernels, and on which no hash grid works."""
        pretend_gpus(1)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(hash_backends, "try_backend", lambda name, device: "it is not installed")
        monkeypatch.setitem(sys.modules, "gsplat.csrc", None)  # type: ignore[arg-type]
        monkeypatch.setattr(shutil, "which", lambda name: None)
        return monkeypatch

    def test_gsplat(self, gpu: pytest.MonkeyPatch, pretend_gpus: Callable[[int], None], tmp_path: Path) -> None:
        def find() -> Finding:
            return by_name(doctor.check_backends)["gsplat"]

        assert find().verdict is Verdict.ABSENT and "CUDA toolkit" in find().advice
        gpu.setattr(shutil, "which", lambda name: str(tmp_path / "bin" / name) if name == "nvcc" else None)
        gpu.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
        gpu.delitem(sys.modules, "gsplat.cuda._backend", raising=False)
        for name in ("CUDA_HOME", "CUDA_PATH"):
            gpu.delenv(name, raising=False)
        assert find().verdict is Verdict.ABSENT and str(tmp_path / "include") in find().status
        assert "CUDA_HOME" in find().advice
        (tmp_path / "include").mkdir()
        (tmp_path / "include" / "cuda_runtime.h").touch()
        assert find().verdict is Verdict.OK and "compiled at first use" in find().status and not find().advice
        module = ModuleType("gsplat.csrc")
        module.__spec__ = ModuleSpec("gsplat.csrc", None)
        gpu.setitem(sys.modules, "gsplat.csrc", module)
        assert find().status == "with CUDA kernels"
        pretend_gpus(0)
        assert find().verdict is Verdict.OK and "without a GPU" in find().status


class TestWeights:
    def test_lpips(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("TORCH_HOME", str(tmp_path))
        monkeypatch.setattr(torch.hub, "_hub_dir", None)
        assert by_name(doctor.check_weights)["LPIPS (AlexNet)"].verdict is Verdict.ABSENT
        path = tmp_path / "hub" / "checkpoints" / "alexnet-owt-7be5be79.pth"
        path.parent.mkdir(parents=True)
        path.touch()
        assert by_name(doctor.check_weights)["LPIPS (AlexNet)"].status == str(path)

    def test_broken_extractor_of_another_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Info:
            provider = "some-package"

            def weights_status(self) -> None:
                raise RuntimeError("it is broken")

        monkeypatch.setattr("f3rm_ext.features.extractors.registry.available_extractors", lambda: {"odd": Info()})
        finding = by_name(doctor.check_weights)["odd"]
        assert finding.status == "RuntimeError: it is broken" and "some-package" in finding.advice


def test_folder_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("F3RM_EXT_CACHE", str(tmp_path / "not" / "yet"))
    usage = SimpleNamespace(free=100 << 30)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage if path == tmp_path else None)
    (finding,) = doctor.check_storage()
    assert finding.verdict is Verdict.OK and finding.status == f"{tmp_path / 'not' / 'yet'} (100.0 GiB free)"
    usage.free = 1 << 30
    (finding,) = doctor.check_storage()
    assert finding.verdict is Verdict.ABSENT and finding.advice


class TestMethods:
    @staticmethod
    def points(**loaders: Callable[[], Any]) -> Callable[..., list[SimpleNamespace]]:
        def entry_points(group: str) -> list[SimpleNamespace]:
            if group != "nerfstudio.method_configs":
                return []
            package = SimpleNamespace(name="some-plugin")
            return [SimpleNamespace(name=name, load=load, dist=package) for name, load in loaders.items()]

        return entry_points

    def test_plugin_that_would_stop_every_command(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail() -> None:
            raise ValueError("mutable default")

        monkeypatch.setattr(importlib.metadata, "entry_points", self.points(bad=fail, good=SimpleNamespace))
        found = by_name(doctor.check_methods)
        assert found["bad (method)"].verdict is Verdict.BROKEN
        assert "uninstall some-plugin" in found["bad (method)"].advice
        assert found["good (method)"].verdict is Verdict.OK

    def test_library_of_the_system_that_is_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail() -> None:
            raise ImportError("libgthread-2.0.so.0: cannot open shared object file: No such file or directory")

        monkeypatch.setattr(importlib.metadata, "entry_points", self.points(ours=fail))
        (found,) = doctor.check_methods()
        assert "libglib2.0-0" in found.advice and "uninstall" not in found.advice


class TestReport:
    @pytest.fixture
    def findings(self, monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
        findings = [
            Finding("packages", "torch", Verdict.OK, "2.x"),
            Finding("packages", "gsplat", Verdict.ABSENT, "not [installed]", "Install it."),
        ]
        monkeypatch.setattr(doctor, "CHECKS", (lambda: iter(findings),))
        return findings

    def test_table(self, findings: list[Finding], capsys: pytest.CaptureFixture) -> None:
        assert Doctor().main() == 0
        out = capsys.readouterr().out
        assert "not [installed]" in out and "gsplat: Install it." in out
        findings.append(Finding("packages", "numba", Verdict.BROKEN, "not installed", "Install it."))
        assert Doctor().main() == 1 and "numba: Install it." in capsys.readouterr().out

    def test_json(self, findings: list[Finding], capsys: pytest.CaptureFixture) -> None:
        assert Doctor(json=True).main() == 0
        report = json.loads(capsys.readouterr().out)
        assert report["ok"] is True
        assert report["findings"][1] == {
            "topic": "packages",
            "name": "gsplat",
            "verdict": "absent",
            "status": "not [installed]",
            "advice": "Install it.",
        }

    def test_check_that_fails_is_a_finding(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def check_oddities() -> Iterator[Finding]:
            yield Finding("oddities", "first", Verdict.OK, "fine")
            raise RuntimeError("boom")

        monkeypatch.setattr(doctor, "CHECKS", (check_oddities,))
        first, second = doctor.examine()
        assert first.name == "first"
        assert second.verdict is Verdict.BROKEN and second.status == "RuntimeError: boom"
