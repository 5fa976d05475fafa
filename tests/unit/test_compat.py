"""Knowledge of versions: safe globals, devices, the viewer, and life without gsplat."""

import dataclasses
import importlib
import os
import shutil
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from nerfstudio.configs.base_config import ViewerConfig
from nerfstudio.viewer import render_state_machine
from nerfstudio.viewer.render_state_machine import RenderStateMachine
from nerfstudio.viewer_legacy.server.viewer_utils import IOChangeException

from f3rm_ext import compat
from f3rm_ext.errors import ConfigError


def in_process(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


class TestSafeGlobals:
    def test_numpy_scalars_load_only_once_registered(self, tmp_path: Path) -> None:
        path = tmp_path / "x.ckpt"
        torch.save(OrderedDict(f64=np.float64(1.5), f32=np.float32(2), i64=np.int64(3)), path)
        code = """
import sys, torch
try:
    torch.load(sys.argv[1], weights_only=True)
    raise SystemExit("loads without")
except Exception as error:
    assert "weights_only" in str(error).lower(), error
from f3rm_ext import compat
compat.register_safe_globals()
compat.register_safe_globals()
print(*torch.load(sys.argv[1], weights_only=True).values())
"""
        result = in_process(code, str(path))
        assert result.returncode == 0, result.stderr
        assert result.stdout.split() == ["1.5", "2.0", "3"]

    def test_files_of_the_other_numpy_version_load_too(self, tmp_path: Path) -> None:
        names = [b"numpy.core.multiarray", b"numpy._core.multiarray"]
        path = tmp_path / "x.ckpt"
        torch.save(np.float64(1.5), path, _use_new_zipfile_serialization=False)
        content = path.read_bytes()
        (written,) = (name for name in names if name in content)
        compat.register_safe_globals()
        for name in names:
            path.write_bytes(content.replace(written, name))
            assert torch.load(path, weights_only=True) == 1.5

    @pytest.mark.parametrize("version", ["2.4.1+cu124", "2.5.1"])
    def test_torch_before_2_6_gets_no_pairs(self, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
        """It takes whatever it is given, and looks up its module and name at each file that it loads."""
        allowed: list[Any] = []
        monkeypatch.setattr(torch, "__version__", version)
        monkeypatch.setattr(torch.serialization, "add_safe_globals", allowed.extend)
        compat.register_safe_globals()
        names = {f"{entry.__module__}.{entry.__name__}" for entry in allowed}
        assert "numpy.dtype" in names and any(name.endswith(".multiarray.scalar") for name in names)

    def test_anything_else_is_still_refused(self, tmp_path: Path) -> None:
        compat.register_safe_globals()
        torch.save({"path": Path("x")}, tmp_path / "x.ckpt")
        with pytest.raises(Exception, match=r"[Ww]eights"):
            torch.load(tmp_path / "x.ckpt", weights_only=True)


class TestDevices:
    def test_looking_for_cuda_leaves_the_environment_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        name = "PYTORCH_NVML_BASED_CUDA_CHECK"
        monkeypatch.setenv(name, "0")
        compat.has_cuda()
        assert os.environ[name] == "0"
        monkeypatch.delenv(name)
        compat.has_cuda()
        assert name not in os.environ

    def test_absent_devices(self, monkeypatch: pytest.MonkeyPatch, pretend_gpus: Callable[[int], None]) -> None:
        pretend_gpus(0)
        with pytest.raises(ConfigError, match=r"--machine\.device-type cpu"):
            compat.check_device("cuda")
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
        with pytest.raises(ConfigError, match="mps"):
            compat.check_device("mps")
        compat.check_device("cpu")
        with pytest.raises(ConfigError, match=r"num-devices.*2.*--nproc-per-node 2"):
            compat.check_device("cpu", num_devices=2)
        with pytest.raises(ConfigError, match="is 0"):
            compat.check_device("cpu", num_devices=0)

    def test_too_few_gpus(self, pretend_gpus: Callable[[int], None]) -> None:
        pretend_gpus(2)
        compat.check_device("cuda", num_devices=2)
        with pytest.raises(ConfigError, match=r"num-devices.*4.* 2 CUDA"):
            compat.check_device("cuda", num_devices=4)


class TestGsplatKernels:
    """gsplat's CUDA kernels are compiled with the wheel, compiled at first use, or not there."""

    @pytest.fixture
    def gpu(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
        """A GPU, and neither compiled kernels nor a compiler."""
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
        monkeypatch.delitem(sys.modules, "gsplat.cuda._backend", raising=False)
        for name in ("CUDA_HOME", "CUDA_PATH", "CPATH"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(compat, "has_cuda", lambda: True)
        monkeypatch.setattr(shutil, "which", lambda name: None)
        monkeypatch.setattr(torch, "__version__", "2.4.1+cu124")
        monkeypatch.setattr(torch.version, "cuda", "12.4")
        monkeypatch.setattr(sys, "version_info", (3, 10, 0))
        return monkeypatch

    @staticmethod
    def put(monkeypatch: pytest.MonkeyPatch, kernels: object) -> None:
        monkeypatch.setitem(sys.modules, "gsplat.cuda._backend", SimpleNamespace(_C=kernels))

    def test_neither_compiled_nor_a_compiler(self, gpu: pytest.MonkeyPatch) -> None:
        self.put(gpu, None)
        with pytest.raises(ConfigError) as refused:
            compat.check_gsplat_kernels()
        text = str(refused.value)
        assert "\n" not in text and "CUDA toolkit 12.4" in text and "--machine.device-type cpu" in text
        assert "--index-url https://docs.gsplat.studio/whl/pt24cu124" in text
        self.put(gpu, object())
        compat.check_gsplat_kernels()

    def test_missing(self, gpu: pytest.MonkeyPatch) -> None:
        gpu.setitem(sys.modules, "gsplat", None)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"cannot be imported.*pip install gsplat.*--machine\.device-type cpu"):
            compat.check_gsplat_kernels()
        works, state, advice = compat.describe_gsplat()
        assert not works and "missing" in state and "pip install gsplat" in advice

    def test_headers_that_torch_will_not_find(self, gpu: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """nvcc is a wrapper in a folder of programs, beside which there is no toolkit."""
        gpu.setattr(shutil, "which", lambda name: str(tmp_path / "bin" / name))
        gpu.setattr(compat.gsplat, "_gsplat_kernels", lambda: pytest.fail("minutes would be lost in compiling"))
        toolkit = tmp_path / "cuda-12.4"
        gpu.setattr(compat.gsplat, "_LIKELY", (f"{tmp_path}/cuda-*",))
        for found in (False, True):
            if found:
                (toolkit / "include").mkdir(parents=True)
                (toolkit / "include" / "cuda_runtime.h").touch()
            with pytest.raises(ConfigError) as refused:
                compat.check_gsplat_kernels()
            assert str(tmp_path / "include") in str(refused.value) and "CUDA_HOME" in str(refused.value)
            assert (str(toolkit) in str(refused.value)) is found
        gpu.setattr(compat.gsplat, "_gsplat_kernels", object)
        with gpu.context() as patch:
            patch.setenv("CUDA_HOME", str(toolkit))
            compat.check_gsplat_kernels()
        compiled = tmp_path / "extensions" / "gsplat_cuda"
        compiled.mkdir(parents=True, exist_ok=True)  # torch may have made it
        (compiled / "gsplat_cuda.so").touch()
        compat.check_gsplat_kernels()  # needs no headers

        def fail() -> None:
            raise RuntimeError("Ninja is required to load C++ extensions.\nMore about it.")

        gpu.setattr(compat.gsplat, "_gsplat_kernels", fail)
        with pytest.raises(ConfigError, match=r"\(Ninja is [^\n]*\): "):
            compat.check_gsplat_kernels()

    @pytest.mark.parametrize(
        ("python", "version", "cuda", "wheels"),
        [
            ((3, 10), "2.1.2+cu118", "11.8", "pt21cu118"),
            ((3, 10), "2.4.1+cu121", "12.1", "pt24cu121"),
            ((3, 11), "2.4.1+cu121", "12.1", None),
            ((3, 10), "2.3.1+cu124", "12.4", None),
            ((3, 10), "2.15.0+cu132", "13.2", None),
            ((3, 10), "2.4.1+cpu", None, None),
        ],
    )
    def test_wheels(
        self, gpu: pytest.MonkeyPatch, python: tuple[int, int], version: str, cuda: str | None, wheels: str | None
    ) -> None:
        gpu.setattr(torch, "__version__", version)
        gpu.setattr(torch.version, "cuda", cuda)
        gpu.setattr(sys, "version_info", (*python, 0))
        assert compat.gsplat.gsplat_wheels() == (wheels and f"https://docs.gsplat.studio/whl/{wheels}")
        advice = compat.gsplat.gsplat_advice()
        assert "CUDA toolkit" in advice and ("--index-url" in advice) == (wheels is not None)


class TestViewer:
    def test_render_thread_is_recognised(self) -> None:
        seen: list[bool] = []
        machine = RenderStateMachine.__new__(RenderStateMachine)
        threading.Thread.__init__(machine)
        machine.run = lambda: seen.append(compat.is_viewer_thread())  # type: ignore[method-assign]
        other = threading.Thread(target=lambda: seen.append(compat.is_viewer_thread()))
        for thread in (machine, other):
            thread.start()
            thread.join()
        assert seen == [True, False]
        assert not compat.is_viewer_thread()
        assert compat.viewer_interrupts() == (IOChangeException,)

    def test_a_still_picture_grows_in_passes_and_a_moved_camera_ends_them(self, monkeypatch) -> None:
        sizes: list[tuple[Any, ...]] = []
        machine = RenderStateMachine.__new__(RenderStateMachine)
        threading.Thread.__init__(machine)
        machine.viewer = SimpleNamespace(step=0)  # type: ignore[assignment]
        interrupted, trained = threading.Event(), threading.Event()

        class Picture:
            def __init__(self) -> None:
                sizes.append(("begun",))

            def camera(self, whole: str, divisor: int) -> str:
                return f"{whole} / {divisor}"

        def render(self: Any, camera_state: Any) -> str:
            if interrupted.is_set():
                raise IOChangeException
            size = self._calculate_image_res(camera_state.aspect)
            sizes.append((self.state, render_state_machine.get_camera(camera_state, *size)))
            self.viewer.step += trained.is_set()
            return "outputs"

        def size(self: Any, aspect: float) -> tuple[int, int]:
            return (320, 481) if self.state == "high" else (30, 45)

        for name, function in (("_render_img", render), ("_calculate_image_res", size)):
            monkeypatch.setattr(RenderStateMachine, name, function)
        monkeypatch.setattr(render_state_machine, "get_camera", lambda state, height, width: f"{height} x {width}")
        monkeypatch.setattr(
            RenderStateMachine, "_send_output_to_viewer", lambda self, outputs: sizes.append((outputs,))
        )
        actions: list[str] = []
        monkeypatch.setattr(RenderStateMachine, "action", lambda self, action: actions.append(action.action))
        for _ in range(2):
            compat.render_in_passes(Picture, lambda divisor, seconds: 8 if divisor is None else divisor // 4 or 1)  # type: ignore[arg-type]
        camera = SimpleNamespace(aspect=1.5)
        for state in ("low_static", "high", "high", "low_move"):
            machine.state = state
            assert machine._render_img(camera) == "outputs"  # type: ignore[arg-type]
        passes = [("high", f"320 x 481 / {divisor}") for divisor in (8, 2, 1)]
        shown = [("begun",), passes[0], ("outputs",), passes[1], ("outputs",), passes[2]]
        assert sizes == [("low_static", "30 x 45"), *shown, ("begun",), passes[2], ("low_move", "30 x 45")]
        assert actions == ["static"], "passes follow at once where the camera stands"

        trained.set()
        sizes.clear()
        machine._render_img(camera)  # type: ignore[arg-type]
        machine.state = "high"
        machine._render_img(camera)  # type: ignore[arg-type]
        assert sizes.count(("begun",)) == 3, "passes of different steps are different pictures"
        interrupted.set()
        with pytest.raises(IOChangeException):
            machine._render_img(camera)  # type: ignore[arg-type]
        assert render_state_machine.get_camera(camera, 320, 481) == "320 x 481"

    def test_a_moved_camera_leaves_no_lock_of_a_library_behind(self, monkeypatch) -> None:
        """Wherever the camera moves amid a render, the lock is free afterwards: the next render does not wait."""
        from f3rm_ext.model_components.chunked_rendering import default_chunk

        monkeypatch.setattr(RenderStateMachine, "check_interrupt", RenderStateMachine.check_interrupt)
        compat.interrupt_at_calls()

        def draw(lock: threading.Lock) -> None:
            for _ in range(3):
                with lock:
                    default_chunk(torch.device("cpu"))

        def render(lock: threading.Lock, move_at: int) -> tuple[bool, int]:
            """Returns whether the render was interrupted, and the number of its events."""
            machine = RenderStateMachine.__new__(RenderStateMachine)
            machine.interrupt_render_flag, events = False, 0

            def trace(frame: Any, event: str, arg: Any) -> Any:
                nonlocal events
                events += 1
                machine.interrupt_render_flag |= events == move_at
                return machine.check_interrupt(frame, event, arg) and trace

            sys.settrace(trace)
            try:
                draw(lock)
            except IOChangeException:
                return True, events
            finally:
                sys.settrace(None)
            return False, events

        _, count = render(threading.Lock(), -1)
        interrupted = 0
        for move_at in range(1, count + 1):
            lock = threading.Lock()
            interrupted += render(lock, move_at)[0]
            assert not lock.locked(), move_at
        assert interrupted > count // 2

    def test_a_process_ends_while_a_page_is_rendered(self) -> None:
        """Threads that are in torch when Python ends abort the process."""
        code = """
import sys, threading
from types import SimpleNamespace
import torch
from f3rm_ext import compat

class Machine(threading.Thread):
    running, began = True, threading.Event()

    def run(self):
        while self.running:
            torch.relu(torch.ones(64, 64)) @ torch.ones(64, 64)
            self.began.set()

machines = {number: Machine(daemon=True) for number in range(2)}
compat.end_viewer_threads_at_exit(SimpleNamespace(render_statemachines=machines))
for machine in machines.values():
    machine.start()
Machine.began.wait()
sys.exit(130)
"""
        result = in_process(code)
        assert result.returncode == 130, result.stderr

    def test_a_page_that_closes_while_its_camera_moves_leaves_no_lock_behind(self, monkeypatch) -> None:
        from viser.infra._infra import WebsockMessageHandler

        monkeypatch.setattr(WebsockMessageHandler, "atomic", WebsockMessageHandler.atomic)
        compat.release_viewer_locks()
        handler = WebsockMessageHandler(thread_executor=None)  # type: ignore[arg-type, abstract]
        with pytest.raises(KeyError), handler.atomic(), handler.atomic():
            raise KeyError("render_statemachines")
        assert handler._atomic_lock.acquire(blocking=False), "the lock is held for ever"
        assert handler._locked_thread_id == -1

    @pytest.mark.parametrize(
        ("host", "argv", "expected"),
        [
            ("0.0.0.0", ["ns-viewer", "--load-config", "c"], "127.0.0.1"),
            ("0.0.0.0", ["ns-viewer", "--viewer.websocket-host", "0.0.0.0"], "0.0.0.0"),
            ("0.0.0.0", ["ns-viewer", "--viewer.websocket_host=0.0.0.0"], "0.0.0.0"),
            ("0.0.0.0", ["ns-viewer", "--viewer.websocket-port", "7008"], "127.0.0.1"),
            ("10.0.0.5", ["script.py"], "10.0.0.5"),
        ],
    )
    def test_host(self, host: str, argv: list[str], expected: str, set_command_line: Callable[..., None]) -> None:
        set_command_line(*argv)
        assert compat.local_viewer_host(ViewerConfig(websocket_host=host)).websocket_host == expected


class Broken:
    """An import hook under which a package fails as given."""

    def __init__(self, package: str, error: Exception) -> None:
        self.package, self.error = package, error

    def find_spec(self, name: str, *_: Any) -> None:
        if name.split(".", maxsplit=1)[0] == self.package:
            raise self.error


class TestGsplat:
    @pytest.fixture(autouse=True)
    def _without_splatfacto(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As at the start of a process: neither gsplat nor splatfacto is imported; put back afterwards."""
        import nerfstudio.models.splatfacto as splatfacto

        monkeypatch.setattr(sys.modules["nerfstudio.models"], "splatfacto", splatfacto)
        for name in list(sys.modules):
            if name.split(".")[0] == "gsplat" or name == splatfacto.__name__:
                monkeypatch.delitem(sys.modules, name)

    @pytest.mark.parametrize(
        "error", [ModuleNotFoundError("No module named 'gsplat'"), OSError("gsplat.so: undefined symbol")]
    )
    def test_splatfacto_can_be_imported_and_says_why_it_cannot_be_used(
        self, monkeypatch: pytest.MonkeyPatch, error: Exception
    ) -> None:
        monkeypatch.setattr(sys, "meta_path", [Broken("gsplat", error), *sys.meta_path])
        with pytest.raises(type(error)):
            importlib.import_module("nerfstudio.models.splatfacto")
        compat.tolerate_missing_gsplat()
        splatfacto = importlib.import_module("nerfstudio.models.splatfacto")
        for name in ("DefaultStrategy", "rasterization"):
            with pytest.raises(ImportError, match="pip install gsplat"):
                getattr(splatfacto, name)()

    def test_stays_missing_for_everybody_else(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "gsplat", None)  # type: ignore[arg-type]
        compat.tolerate_missing_gsplat()
        assert [name for name in sys.modules if name.split(".")[0] == "gsplat"] == ["gsplat"]
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("gsplat")

    def test_real_one_is_left_alone(self) -> None:
        real = pytest.importorskip("gsplat.strategy")
        compat.tolerate_missing_gsplat()
        assert importlib.import_module("nerfstudio.models.splatfacto").DefaultStrategy is real.DefaultStrategy


def test_known_noise_is_silenced_and_nothing_else() -> None:
    code = """
import warnings
from f3rm_ext import compat
compat.quiet_known_warnings()
import torch
from nerfstudio.cameras.cameras import Cameras
with warnings.catch_warnings(record=True) as caught:
    Cameras(torch.eye(4)[None, :3], 1.0, 1.0, 1.0, 1.0, 2, 2).generate_rays(camera_indices=0)
    warnings.warn("Using a non-tuple sequence, but elsewhere", UserWarning)
    text = "\\x1b[1mThe TBB threading layer requires TBB version 2021"
    warnings.warn_explicit(text, UserWarning, "parallel.py", 1, module="numba.np.ufunc.parallel")
print([str(one.message) for one in caught if "non-tuple" in str(one.message) or "TBB" in str(one.message)])
"""
    result = in_process(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "['Using a non-tuple sequence, but elsewhere']"


def test_help_texts_are_wrapped_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Line breaks of a docstring are not those of the help; paragraphs and lists stay."""
    import tyro
    from tyro import _strings

    compat.join_help_lines()
    first = _strings.remove_single_line_breaks
    compat.join_help_lines()
    assert _strings.remove_single_line_breaks is first

    @dataclasses.dataclass
    class Options:
        """Some options."""

        window: int = -1
        """Images in memory at a time, 1 or more;
        -1 or inf: all.

        Either
        - one
        - or the other

        As in
          program --window 2
          program --window -1"""

    with pytest.raises(SystemExit):
        tyro.cli(Options, args=["--help"], prog="program")
    lines = [" ".join(line.strip("│ \n").split()) for line in capsys.readouterr().out.splitlines()]
    assert any("at a time, 1 or more; -1 or inf: all." in line for line in lines), lines
    assert {"As in", "program --window 2"} <= set(lines)
    assert {"- one", "Either"} <= set(lines) and any(line.startswith("- or the other") for line in lines)


SHORT = """
import sys
from f3rm_ext import compat
compat.shorten_imports()
compat.shorten_imports()
import nerfstudio.engine.trainer as trainer
import torch
torch.optim.Adam([torch.nn.Parameter(torch.ones(1))]).step()
unused = ("nerfstudio.models.splatfacto", "torchvision.models", "torch.utils.tensorboard.writer", "torch._dynamo.utils")
print(*(name in sys.modules for name in (*unused, "torchvision.utils")))
try:
    trainer.ViewerState()
except TypeError:
    print("nerfstudio.models.splatfacto" in sys.modules)
import torchvision.models
from nerfstudio.viewer.viewer import Viewer
print(torchvision.models.resnet18.__name__, torchvision.__version__[0], Viewer.__module__)
from torch.utils.tensorboard import SummaryWriter
writer = SummaryWriter(sys.argv[1])
writer.close()
print(type(writer).__module__, *torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(1)).tolist())
"""


def test_what_plans_do_not_use_is_imported_when_it_is_used(tmp_path: Path) -> None:
    done = in_process(SHORT, str(tmp_path))
    assert done.returncode == 0, done.stderr
    unused, used = ["False"] * 4, ["True", "True"]
    viewer, writer = "nerfstudio.viewer.viewer", "torch.utils.tensorboard.writer"
    assert done.stdout.split() == [*unused, *used, "resnet18", "0", viewer, writer, "1.0"]
