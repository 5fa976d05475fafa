"""Triton's kernels without a GPU: their values in Triton's interpreter, their compilation, and life without them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from f3rm_ext.splat import triton_kernels
from f3rm_ext.splat.memory import packed
from f3rm_ext.splat.regularization import field

TESTS = Path(__file__).parents[1]
ARCHITECTURES = (75, 80, 89, 90)
"""Compute capabilities ×10: Turing, Ampere, Ada and Hopper."""
UNIT = TESTS / "unit" / "splat"
AGAIN = (
    "test_losses.py",
    "regularization/test_field.py",
    "regularization/test_plane_kernels.py",
    "memory/test_adam.py::test_the_kernel_takes_the_steps_of_torch",
    "memory/test_adam.py::test_the_kernel_rounds_to_the_neighbours_and_is_right_in_the_mean",
    "memory/test_adam.py::test_large_and_small_numbers_stay_in_range",
    "memory/test_adam.py::test_no_gaussians",
    "memory/test_adam.py::test_a_resumed_run_goes_the_same_way",
)
TWO_THREADS = "regularization/test_field.py::test_gradients_of_kernels_are_those_of_torch[two]"
"""Triton's kernels have one table of gradients for any number of threads: this would be the case of one again."""
KERNELS = [*sorted(UNIT.rglob("interpreted_*.py")), *(f"{UNIT}/{name}" for name in AGAIN)]
KERNELS += ["--deselect", f"tests/unit/splat/{TWO_THREADS}"]
STEPS = TESTS / "cuda_contract" / "interpreted_steps.py"
PLUGINS = "-p pretend.interpreter -p pretend.short_imports".split()


@pytest.mark.parametrize(
    ("checks", "least"),
    [
        pytest.param([*KERNELS, STEPS], "3.0", id="kernels and steps"),
        pytest.param([STEPS, "-m", "release"], "3.4", id="other steps", marks=pytest.mark.release),
    ],
)
def test_interpreted(checks: list[Any], least: str, tmp_path: Path) -> None:
    """In a process of its own: Triton decides when it is imported whether it interprets."""
    pytest.importorskip("triton", minversion=least, reason="Triton is not installed")
    paths = os.pathsep.join([str(TESTS / "cuda_contract"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, *"-m pytest -q -p no:cacheprovider -p no:xdist -p no:dash".split(), *PLUGINS, *checks],
        env={**os.environ, "TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": paths},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-6000:] + done.stderr[-1000:]


def _compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], architecture: int, **options: Any) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {**types, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's compiler, which needs no GPU to produce code for one."""
    pytest.importorskip("triton.backends.nvidia")
    if not hasattr(__import__("triton"), "knobs"):
        pytest.skip("this Triton's compiler has another interface")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_field_compiles(architecture: int) -> None:
    from f3rm_ext.splat.regularization import triton_field as kernels

    given = dict.fromkeys(("points", "owners", "table", "neighbours"), "*fp32")
    given |= {"owners": "*i64", "neighbours": "*i32"}
    results = dict.fromkeys(("density", "beta", "direction", "totals"), "*fp32")
    grads = ("totals", "grad_density", "grad_beta", "grad_direction", "grad_points", "grad_table")
    constants = {"K": 16, "SIZE": kernels.BLOCK}
    _compiled(kernels._forward, {**given, **results, "count": "i32"}, constants, architecture)
    made = _compiled(
        kernels._backward, {**given, **dict.fromkeys(grads, "*fp32"), "count": "i32"}, constants, architecture
    )
    # Three for the own normal, and one for each of a neighbour's 17 numbers; none returns the old value.
    assert made.asm["ptx"].count("atom.") + made.asm["ptx"].count("red.") == 20


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("architecture", "storage", "half"), [(75, "float32", False), (80, "int8", True), (89, "bfloat16", True)]
)
def test_the_optimizer_compiles(architecture: int, storage: str, half: bool) -> None:
    from f3rm_ext.splat.memory import triton_adam as kernels

    moments = {"float32": ("*fp32", "*fp32"), "bfloat16": ("*bf16", "*bf16"), "int8": ("*i8", "*u8")}[storage]
    names = "rate root_correction eps keep1 add1 keep2 add2 log1 log2 log_ratio series".split()
    types = {
        **{"value": "*fp16" if half else "*fp32", "first": moments[0], "second": moments[1]},
        **dict.fromkeys(("first_scale", "second_scale"), "*fp32" if storage == "int8" else "*i32"),
        **{"seen": "*i32", "directions": "*fp32", "colors": "*fp32", "count": "i32", "step": "i32", "seed": "i64"},
        **dict.fromkeys(names, "fp32"),
    }
    constants = {"PICTURES": 1, "COLUMNS": 45, "WIDTH": 64, "ROWS": kernels.ROWS, "DEGREE": 3}
    constants |= {"STORAGE": kernels.STORAGES.index(storage), "HALF": half}
    assert _compiled(kernels._step, types, constants, architecture, enable_fp_fusion=False).asm["ptx"]


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(("architecture", "size"), [(75, 11), (80, 11), (89, 0), (90, 11)])
def test_the_photometric_loss_compiles(architecture: int, size: int) -> None:
    from f3rm_ext.splat import triton_photometric as kernels

    constants = {"SIZE": size, "ROWS": kernels.ROWS, "COLUMNS": kernels.COLUMNS}
    pictures = dict.fromkeys(("one", "two", "window", "slopes"), "*fp32")
    sizes = {"parts": "*fp32", "width": "i32"}
    numbers = dict.fromkeys(("ssim_factor", "l1_factor"), "fp32")
    types = {**pictures, "gradient": "*fp32", **sizes, "height": "i32", **numbers}
    assert _compiled(kernels._gradient, types, constants, architecture).asm["ptx"]
    if size:
        types = {**pictures, **sizes, "rows": "i32", "factor": "fp32"}
        assert _compiled(kernels._slopes, types, constants, architecture).asm["ptx"]


SURFACE_KERNELS = {
    "_facing_planes": "means quats scales viewmat planes count",
    "_facing_planes_backward": "means quats scales viewmat grads grad_means grad_quats count",
    "_plane_depth": "normals distances K depth slopes count w least_cosine",
    "_plane_depth_backward": "depth slopes K grads grad_normals grad_distances count w",
    "_dn_consistency": "depth alpha normals weights K grad_depth grad_alpha grad_normals parts count w least scale",
    "_steepness": "photo steepness tops count w",
    "_flatness": "weights top count w",
    "_multiview_consistency": (
        "depth other K K_other viewmat viewmat_other trust gradient parts count w h2 w2 most scale"
    ),
    "_patch_disagreement": (
        "depth normals photo picture trust places K K_other viewmat viewmat_other grad_depth grad_normals losses "
        "count w h2 w2 least most"
    ),
}
"""Arguments of the kernels of planes and views."""
NUMBERS = dict.fromkeys(("count", "w", "h2", "w2"), "i32") | {"places": "*i64"}
NUMBERS |= dict.fromkeys(("least_cosine", "least", "most", "scale"), "fp32")


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("architecture", [75, 90])
@pytest.mark.parametrize("name", SURFACE_KERNELS)
def test_planes_and_views_compile(name: str, architecture: int) -> None:
    from f3rm_ext.splat.regularization import triton_planes, triton_views

    types = {word: NUMBERS.get(word, "*fp32") for word in SURFACE_KERNELS[name].split()}
    constants: dict[str, Any] = {"SIZE": triton_planes.BLOCK}
    if name == "_dn_consistency":
        constants["DIVIDE"] = True
    if name == "_patch_disagreement":
        constants = {"RADIUS": 3, "LANES": 64, "SIZE": triton_views.PATCHES}
    kernel = getattr(triton_planes, name, None) or getattr(triton_views, name)
    assert "atom." not in _compiled(kernel, types, constants, architecture).asm["ptx"]


@pytest.fixture
def pretended_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """A machine with a GPU; what was found on it is forgotten."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for found in (triton_kernels._load_kernels, triton_kernels._explain):
        found.cache_clear()
    yield torch.device("cuda")
    for found in (triton_kernels._load_kernels, triton_kernels._explain):
        found.cache_clear()


def test_there_are_none_on_the_cpu_or_without_a_gpu() -> None:
    assert triton_kernels.find_kernels(field.TRITON_KERNELS, torch.device("cpu")) is None
    if not torch.cuda.is_available():
        assert triton_kernels.find_kernels(field.TRITON_KERNELS, torch.device("cuda")) is None


def test_they_are_tried_once_and_a_failure_is_said_once(
    pretended_cuda: torch.device, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[str] = []

    def load(name: str) -> SimpleNamespace:
        def try_out(device: torch.device) -> None:
            tried.append(name)
            assert device == torch.device("cuda", 0)
            raise RuntimeError("Failed to find C compiler.\nPlease [specify] it")

        return SimpleNamespace(try_out=try_out)

    monkeypatch.setattr(triton_kernels, "importlib", SimpleNamespace(import_module=load))
    names = [field.TRITON_KERNELS, packed.TRITON_KERNELS]
    for name in (*names, *names):
        assert triton_kernels.find_kernels(name, pretended_cuda) is None
    assert tried == names
    text = " ".join(word for word in capsys.readouterr().out.split() if "kernel_trials.py" not in word)
    assert text.count("Splats on cuda:0 run on plain torch, which is slower, since Triton does not work here") == 1
    assert text.count("(Failed to find C compiler") == 1


def test_a_missing_triton_is_named(
    pretended_cuda: torch.device, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(name: str) -> None:
        raise ModuleNotFoundError("No module named 'triton'", name="triton")

    monkeypatch.setattr(triton_kernels, "importlib", SimpleNamespace(import_module=load))
    assert triton_kernels.find_kernels(field.TRITON_KERNELS, pretended_cuda) is None
    words = [word for word in capsys.readouterr().out.split() if "kernel_trials.py" not in word]
    assert "(it is not installed)" in " ".join(words)


def test_those_that_work_are_used(pretended_cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(try_out=lambda device: None)
    monkeypatch.setattr(triton_kernels, "importlib", SimpleNamespace(import_module=lambda name: module))
    assert triton_kernels.find_kernels(field.TRITON_KERNELS, pretended_cuda) is module
