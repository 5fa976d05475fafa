"""Kernels of a step, and places where it makes the host wait for the GPU, do not become more unnoticed.

budget.json has what is allowed. After a change that is meant, write it anew and look at the difference:

    F3RM_EXT_WRITE_BUDGET=1 pytest tests/cuda_contract/test_budget.py
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pretend.gsplat_kernels import gsplat_kernels
from pretend.ledger import counted
from pretend.pretraining import moco_step, pose_step
from pretend.small import FIELDS, small
from pretend.steps import Counts, lift_made_up_features, make_run, total
from pretend.tensors import pretended

BUDGET = Path(__file__).with_name("budget.json")
WRITES = "F3RM_EXT_WRITE_BUDGET" in os.environ
SLACK = 1.05
"""Versions of torch differ a little in the operators of a formula."""


def _training(method: str, mode: str, step: int, **densify: Any) -> Callable[[Path, Path], Counts]:
    def count(capture: Path, folder: Path) -> Counts:
        run = make_run(method, capture, folder, small(method, mode, **densify))
        run.step(step - 1)  # what is done once is done
        return run.step(step)

    return count


def _query(method: str) -> Callable[[Path, Path], Counts]:
    def count(capture: Path, folder: Path) -> Counts:
        run = make_run(method, capture, folder, small(method))
        if method not in FIELDS:
            lift_made_up_features(run, 8)
        run.query(40, 24)
        return run.query(40, 24)

    return count


def _poses(preset: str, *words: str) -> Callable[[Path, Path], Counts]:
    def count(capture: Path, folder: Path) -> Counts:
        pytest.importorskip("diffusers")
        return pose_step(preset, folder / "encoder", *words)

    return count


CASES = {
    "f3rm-ext": _training("f3rm-ext", "none", 1),
    "f3rm-ext-lite": _training("f3rm-ext-lite", "none", 1),
    "f3rm-ext-big": _training("f3rm-ext-big", "none", 1),
    "f3rm-ext query": _query("f3rm-ext"),
    "sugar-ext vanilla": _training("sugar-ext", "none", 4002),
    "sugar-ext entropy": _training("sugar-ext", "density", 7902),
    "sugar-ext density": _training("sugar-ext", "density", 9602),
    "sugar-ext sdf": _training("sugar-ext", "sdf", 9602),
    "sugar-ext dn-consistency": _training("sugar-ext", "dn-consistency", 9602),
    "sugar-ext planar": _training("sugar-ext", "planar", 9602),
    "sugar-ext mcmc": _training("sugar-ext", "none", 4002, strategy="mcmc"),
    "sugar-ext query": _query("sugar-ext"),
    "diffusionsfm sparse": _poses("sparse"),
    "diffusionsfm dense, head": _poses("dense"),
    "diffusionsfm dense, all": _poses("dense", "training.reinit_after=0"),
    "moco v2": lambda capture, folder: moco_step("v2"),
    "moco v3": lambda capture, folder: moco_step("v3"),
}
WITH_TRITON = {
    "f3rm-ext, Triton": ("f3rm-ext", "none", 1),
    "sugar-ext vanilla, Triton": ("sugar-ext", "none", 4002),
    "sugar-ext density, Triton": ("sugar-ext", "density", 9602),
    "sugar-ext planar, Triton": ("sugar-ext", "planar", 9602),
}
"""Method, regularisation and step of what interpreted_steps.py counts."""


def kernels(counts: Counts) -> dict[str, int]:
    """Kernels by phase."""
    return {phase: ledger.total for phase, ledger in counts.items() if ledger.total}


def over(counts: Counts, allowed: dict[str, Any]) -> list[str]:
    """What is more than allowed, one sentence each."""
    found = [
        f"{phase}: {count} kernels instead of {allowed['kernels'].get(phase, 0)}"
        for phase, count in kernels(counts).items()
        if count > SLACK * allowed["kernels"].get(phase, 0)
    ]
    whole = total(counts)
    for (place, kind), count in sorted(whole.waits.items()):
        most = allowed["waits"].get(f"{place} ({kind})", 0)
        if count > most:
            line = whole.lines[place, kind]
            found.append(f"{line}: the host waits for the GPU ({kind}) {count} times instead of {most}")
    return found


def check_budget(name: str, counts: Counts) -> None:
    """Compares counts with the budget of that name, or writes it."""
    budget = json.loads(BUDGET.read_text()) if BUDGET.is_file() else {}
    if WRITES:
        waits = {f"{place} ({kind})": count for (place, kind), count in sorted(total(counts).waits.items())}
        budget[name] = {"kernels": kernels(counts), "waits": waits}
        BUDGET.write_text(json.dumps(budget, indent=1) + "\n")
    assert not (found := over(counts, budget[name])), "\n".join(found)


@pytest.mark.parametrize("name", CASES)
def test_budget(name: str, noise_capture: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    torch.manual_seed(0)
    with pretended("backward"), gsplat_kernels():
        counts = CASES[name](noise_capture, tmp_path_factory.getbasetemp() / "features")
    check_budget(name, counts)


def test_the_budget_has_nothing_else() -> None:
    assert set(json.loads(BUDGET.read_text())) == {*CASES, *WITH_TRITON}


def test_a_new_wait_is_named() -> None:
    with pretended("backward") as device, counted() as ledger:
        numbers = torch.ones(3, device=device)
        assert float(numbers.sum()) == 3.0
        assert len(numbers[numbers > 0]) == 3
        torch.tensor([1.0], device=device)
        torch.ones(3).pin_memory().to(device, non_blocking=True)
        torch.empty(3, pin_memory=True)[:2].to(device, non_blocking=True)
    kinds = {kind: count for (_, kind), count in ledger.waits.items()}
    assert kinds == {"number": 1, "mask": 1, "copy to the GPU": 1}
    with pretended("backward") as device, counted() as pageable:
        torch.ones(3).to(device, non_blocking=True)
    assert pageable.waited == 1, "the host waits for what is not page-locked"
    ledger.launches["made up"] += 100
    found = over({"forward": ledger}, {"kernels": {"forward": 20}, "waits": {}})
    assert len(found) == 4 and "kernels instead of 20" in found[0]
    assert all("the host waits for the GPU" in sentence for sentence in found[1:])
