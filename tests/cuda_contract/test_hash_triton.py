"""The Triton kernels: against the reference in Triton's interpreter, and compiled for GPUs that are not here."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pretend.small import FIELDS, grids_of

from f3rm_ext.method_configs.presets import make_config

pytest.importorskip("triton", minversion="3.4", reason="triton is not installed")

SMALL = [(1, 2, 4, 4, 12), (4, 1, 3, 40, 9), (5, 2, 16, 128, 12), (6, 4, 8, 256, 14), (3, 8, 16, 64, 11)]
"""Levels, features per level, base and finest resolution, log2 of the table."""
PRESETS = {tuple(vars(grid).values()) for name in FIELDS for grid in grids_of(make_config(name).pipeline.model)}
CASES: dict[str, dict[str, Any]] = {
    **{f"preset {shape}": {"shape": shape, "count": 16} for shape in sorted(PRESETS)},
    **{f"small {shape}": {"shape": shape, "count": 10} for shape in SMALL},
    "several blocks": {"shape": SMALL[1], "count": 600},
    "half": {"shape": SMALL[3], "count": 10, "dtype": "float16"},
    "points only": {"shape": SMALL[2], "count": 10, "leaves": "points"},
    "table only": {"shape": SMALL[2], "count": 10, "leaves": "table"},
}


@pytest.fixture(scope="module")
def errors() -> dict[str, dict[str, Any]]:
    """What the interpreter finds for every case, in one process."""
    script = Path(__file__).with_name("interpreted_hash_grid.py")
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", str(script)],
        input=json.dumps(list(CASES.values())),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(CASES, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_the_reference_in_value_and_gradients(name: str, errors: dict[str, dict[str, Any]]) -> None:
    case, found = CASES[name], errors[name]
    assert found.pop("dtype") == case.get("dtype", "float32")
    assert set(found) == {"value", *case.get("leaves", "points table").split()}
    rounding = 1e-3 if "dtype" in case else 0.0  # of the result; gradients are accumulated in float32
    assert found.pop("value") < 1e-6 + rounding
    assert all(error < 2e-6 for error in found.values()), found


@pytest.mark.parametrize(("capability", "width", "bytes_"), [(80, 2, 8), (90, 8, 16)])
def test_kernels_compile_for_gpus(
    capability: int, width: int, bytes_: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """To machine code, as at their first launch; a row of the table is read at once, as far as the hardware can."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from f3rm_ext.nerf import hash_triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = {"rows": "*i32", "count": "i32", "out": "*fp16", "by_out": "*fp16"}
    flags = {"WIDTH": width, "BLOCK": hash_triton.BLOCK, "FOR_POINTS": True, "FOR_TABLE": True}
    options = {name: value for name, value in hash_triton.OPTIONS.items() if name != "BLOCK"}
    for kernel in (hash_triton._forward, hash_triton._backward):
        names = kernel.arg_names
        signature = {name: "constexpr" if name in flags else types.get(name, "*fp32") for name in names}
        constants = {(names.index(name),): value for name, value in flags.items() if name in names}
        aligned = {
            (index,): [["tt.divisibility", 16]] for index, name in enumerate(names) if signature[name].startswith("*")
        }
        source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert made.asm["cubin"]
        vector = f"v{bytes_ // 4}"
        assert re.search(rf"ld\.global\.{vector}\.b32", made.asm["ptx"])
        if kernel is hash_triton._backward and capability >= 90:
            assert f"add.{vector}.f32" in made.asm["ptx"], "as many are added at once"
