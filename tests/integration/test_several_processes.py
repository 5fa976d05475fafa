"""Several processes train together as torchrun starts them: two on the CPU, which talk through gloo."""

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

BIN = Path(sys.executable).parent
PROGRAM = Path(__file__).with_name("rank_training.py")
FIELD = ("--pipeline.datamanager.train-num-rays-per-batch", 255, "--pipeline.model.feature-loss-mult", 1)
SPLATS = (
    *(
        "--pipeline.model.num-random",
        300,
        "--pipeline.model.densify.start",
        0,
        "--pipeline.model.densify.max-gaussians",
        900,
    ),
    *("--pipeline.model.surface.samples", 300, "--pipeline.model.surface.neighbours", 8, "--dense-points", "never"),
)
OPTIONS = {"f3rm-ext-lite": FIELD, "sugar-ext-lite": SPLATS}
WHOLE_STEPS = 12
FIELD_GROUPS = ("fields", "feature-field", "proposal-networks")


@pytest.fixture(scope="module")
def start_ranks(shared_command_server: Any, tiny_capture: Path) -> Callable[..., list[Any]]:
    """Starts ``ns-train`` as so many processes; ends when they end, unless they are to be disturbed."""

    def train(
        out: Path,
        ranks: int,
        stamp: str,
        steps: int,
        *options: object,
        method: str = "f3rm-ext-lite",
        data: Path = tiny_capture,
        disturb: Any = None,
    ) -> list[Any]:
        code = f"import runpy; runpy.run_path({str(PROGRAM)!r}, run_name='__main__')"
        processes = shared_command_server.start_ranks(
            ranks,
            *("python", "-c", code, method, "--data", data),
            *("--output-dir", out, "--experiment-name", "e", "--timestamp", stamp),
            *("--max-num-iterations", steps, "--vis", "tensorboard", "--logging.local-writer.enable", "False"),
            *options,
        )
        if disturb is not None:
            disturb(processes)
        return shared_command_server.finish_ranks(150)

    return train


@pytest.fixture
def train_ranks(start_ranks: Any, command_server: Any, tmp_path: Path) -> Callable[..., list[Any]]:
    """The same into the folder of a test."""
    return functools.partial(start_ranks, tmp_path)


@pytest.fixture(scope="module")
def whole(start_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Trains two processes for twelve steps that nobody disturbs; gives the folder, once for each method."""

    def train(method: str) -> Path:
        out = tmp_path_factory.mktemp("whole")
        options = OPTIONS[method]
        succeeded(start_ranks(out, 2, "whole", WHOLE_STEPS, *options, "--steps-per-save", 4, method=method))
        return out

    return functools.cache(train)


@pytest.fixture
def without_points(tiny_capture: Path, tmp_path: Path) -> Path:
    """A capture without 3D points: splats start as random ones and may grow."""
    copy = Path(shutil.copytree(tiny_capture, tmp_path / "without_points"))
    transforms = json.loads((copy / "transforms.json").read_text())
    del transforms["ply_file_path"]
    (copy / "transforms.json").write_text(json.dumps(transforms))
    return copy


def checkpoint(folder: Path, stamp: str, step: int, method: str = "f3rm-ext-lite") -> dict[str, Any]:
    path = folder / "e" / method / stamp / "nerfstudio_models" / f"step-{step:09d}.ckpt"
    return torch.load(path, weights_only=True)


def parameters(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state["pipeline"].items() if isinstance(value, torch.Tensor)}


def succeeded(done: list[Any]) -> None:
    for rank, one in enumerate(done):
        assert one.code == 0, f"rank {rank}: {one.text[-4000:]}"


def test_two_halves_of_a_batch_are_as_good_as_the_whole(train_ranks: Any, tmp_path: Path) -> None:
    # Adam's usual eps, 1e-15, makes whole steps of the rounding errors of gradients that are nearly zero; a scene full
    # of density has larger ones.
    eps = [word for group in FIELD_GROUPS for word in (f"--optimizers.{group}.optimizer.eps", "1e-3")]
    for ranks, stamp in ((1, "one"), (2, "two")):
        succeeded(train_ranks(ranks, stamp, 10, *FIELD, *eps, "--pipeline.model.init-density", 0.01))
    one, two = (parameters(checkpoint(tmp_path, stamp, 9)) for stamp in ("one", "two"))
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("method", ["f3rm-ext-lite", pytest.param("sugar-ext-lite", marks=pytest.mark.release)])
def test_all_ranks_stop_together_and_go_on_as_if_they_had_not(
    train_ranks: Any, whole: Callable[[str], Path], tmp_path: Path, wait_until: Any, method: str
) -> None:
    options = OPTIONS[method]

    def interrupt(processes: list[int]) -> None:
        saved = tmp_path / "e" / method / "part" / "nerfstudio_models" / "step-000000004.ckpt"
        wait_until(saved.is_file, 60, "a checkpoint")
        os.kill(processes[1], signal.SIGINT)  # one of them suffices

    stopped = train_ranks(
        2, "part", 4000, *options, "--schedule-steps", 0, "--steps-per-save", 4, method=method, disturb=interrupt
    )
    assert [one.code for one in stopped] == [130, 130], stopped[0].text[-3000:] + stopped[1].text[-3000:]
    assert "torchrun --nproc-per-node 2 --no-python" in stopped[0].stderr and "Stopped" not in stopped[1].stderr
    assert "Traceback" not in stopped[0].text + stopped[1].text
    folder = whole(method) / "e" / method / "whole" / "nerfstudio_models"
    succeeded(train_ranks(2, "rest", WHOLE_STEPS, *options, "--load-dir", folder, "--load-step", 8, method=method))
    through = checkpoint(whole(method), "whole", WHOLE_STEPS - 1, method)
    rest = checkpoint(tmp_path, "rest", WHOLE_STEPS - 1, method)
    for name, value in parameters(through).items():
        assert torch.equal(parameters(rest)[name], value), name
    first, second = through["f3rm_ext"]["ranks"]
    assert (first["rank"], second["rank"]) == (0, 1)
    assert not torch.equal(first["random"]["torch"], second["random"]["torch"])
    for mine, other in zip(through["f3rm_ext"]["ranks"], rest["f3rm_ext"]["ranks"], strict=True):
        assert torch.equal(mine["random"]["torch"], other["random"]["torch"])


def test_nerfstudio_and_torchrun_start_the_same_run(
    train_ranks: Any, whole: Callable[[str], Path], tmp_path: Path
) -> None:
    succeeded(train_ranks(2, "by_nerfstudio", WHOLE_STEPS, *FIELD))
    one = checkpoint(tmp_path, "by_nerfstudio", WHOLE_STEPS - 1)
    two = checkpoint(whole("f3rm-ext-lite"), "whole", WHOLE_STEPS - 1)
    assert len(one["f3rm_ext"]["ranks"]) == 2
    for name, value in parameters(one).items():
        assert torch.equal(parameters(two)[name], value), name


@pytest.mark.parametrize("strategy", ["default", pytest.param("mcmc", marks=pytest.mark.release)])
def test_two_processes_grow_the_gaussians_of_one_that_sees_both_images(
    train_ranks: Any, without_points: Path, tmp_path: Path, strategy: str
) -> None:
    rounds = ("--schedule-steps", 15000, "--pipeline.model.densify.start", 5, "--pipeline.model.densify.every", 5)
    growth = ("--pipeline.model.densify.strategy", strategy, "--pipeline.model.densify.grow-grad2d", 2e-4)
    for ranks, stamp in ((1, "both_images"), (2, "two")):
        done = train_ranks(ranks, stamp, 24, *SPLATS, *rounds, *growth, method="sugar-ext-lite", data=without_points)
        succeeded(done)
    one, two = (parameters(checkpoint(tmp_path, stamp, 23, "sugar-ext-lite")) for stamp in ("both_images", "two"))
    assert one.keys() == two.keys()
    count = len(one["_model.gauss_params.means"])
    began = re.search(r"Starting with (\d+) Gaussians", done[0].text)
    assert began is not None and count > int(began[1]), "no Gaussian was added"
    assert len(two["_model.gauss_params.means"]) == count
    for name, value in one.items():
        torch.testing.assert_close(
            two[name], value, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


PLAIN = ("--pipeline.model.regularization", "none")
SHARDED = ("--pipeline.model.shard-gaussians", "True")


def test_divided_gaussians_are_those_of_one_process(train_ranks: Any, without_points: Path, tmp_path: Path) -> None:
    still = (*SPLATS, *PLAIN, "--pipeline.model.densify.strategy", "none")
    succeeded(train_ranks(1, "both_images", 20, *still, method="sugar-ext-lite", data=without_points))
    succeeded(train_ranks(2, "divided", 20, *still, *SHARDED, method="sugar-ext-lite", data=without_points))
    one, two = (checkpoint(tmp_path, stamp, 19, "sugar-ext-lite") for stamp in ("both_images", "divided"))
    assert parameters(one).keys() == parameters(two).keys()
    assert {key: value.shape for key, value in parameters(one).items()} == {
        key: value.shape for key, value in parameters(two).items()
    }

    # One process catches up on harmonics when it sees a Gaussian again; two do so in every step.
    seen = one["optimizers"]["features_rest"]["state"][0]["seen"]
    seen = seen == seen.max()  # in the last step
    assert int(seen.sum()) > 100

    def require_same(ours: torch.Tensor, theirs: torch.Tensor, name: str) -> None:
        rows = (seen if "features_rest" in name else torch.ones_like(seen)).nonzero()[:, 0]
        order = torch.cat([torch.arange(len(ours))[0::2], torch.arange(len(ours))[1::2]])  # by rank
        difference = (torch.empty_like(ours).index_copy_(0, order, ours) - theirs)[rows]
        # Adam makes whole steps of rounding errors where a gradient is nearly zero.
        assert difference.norm() <= 1e-2 * theirs[rows].norm(), name

    for name, value in parameters(one).items():
        if "gauss_params" in name or name.endswith("filter_3d"):
            require_same(parameters(two)[name], value, name)
    for group, item in one["optimizers"].items():
        for key, value in item["state"][0].items():
            if isinstance(value, torch.Tensor) and value.dim() and key != "seen":
                require_same(two["optimizers"][group]["state"][0][key].float(), value.float(), f"{group} {key}")


def test_divided_gaussians_grow_stop_and_go_on(
    train_ranks: Any, without_points: Path, tmp_path: Path, wait_until: Any
) -> None:
    rounds = ("--schedule-steps", 15000, "--pipeline.model.densify.start", 5, "--pipeline.model.densify.every", 5)
    options = (*SPLATS, *PLAIN, *rounds, "--pipeline.model.densify.grow-grad2d", 2e-4, "--steps-per-eval-image", 10)
    method = {"method": "sugar-ext-lite", "data": without_points}
    folder = tmp_path / "e" / "sugar-ext-lite" / "part" / "nerfstudio_models"

    def interrupt(processes: list[int]) -> None:
        wait_until((folder / "step-000000010.ckpt").is_file, 60, "a checkpoint")
        os.kill(processes[1], signal.SIGINT)

    stopped = train_ranks(2, "part", 15000, *options, *SHARDED, "--steps-per-save", 10, **method, disturb=interrupt)
    assert [one.code for one in stopped] == [130, 130], stopped[0].text[-3000:] + stopped[1].text[-3000:]
    last = max(int(path.stem.removeprefix("step-")) for path in folder.iterdir())
    before = parameters(checkpoint(tmp_path, "part", last, "sugar-ext-lite"))["_model.gauss_params.means"]
    began = re.search(r"Starting with (\d+) Gaussians", stopped[0].text)
    assert began is not None and int(began[1]) < len(before) <= 900, "no Gaussian was added, or too many"
    # On as many processes and on one, which holds them all.
    for ranks, stamp, how in ((2, "rest", SHARDED), (1, "one", ())):
        steps = last + 3
        done = train_ranks(ranks, stamp, steps, *options, *how, "--load-dir", folder, "--load-step", last, **method)
        succeeded(done)
        after = checkpoint(tmp_path, stamp, steps - 1, "sugar-ext-lite")
        assert after["step"] == steps - 1
        assert len(parameters(after)["_model.gauss_params.means"]) >= len(before) * 0.5
        for item in after["optimizers"].values():
            for value in item["state"].get(0, {}).values():
                assert (
                    not isinstance(value, torch.Tensor)
                    or value.dim() == 0
                    or len(value) == len(parameters(after)["_model.gauss_params.means"])
                )


def test_where_one_dies_the_others_end_with_a_sentence(train_ranks: Any, tmp_path: Path, wait_until: Any) -> None:
    folder = tmp_path / "e" / "f3rm-ext-lite" / "dead" / "nerfstudio_models"

    def kill(processes: list[int]) -> None:
        wait_until(lambda: folder.is_dir() and any(folder.iterdir()), 60, "a checkpoint")
        os.kill(processes[1], signal.SIGKILL)

    left, killed = train_ranks(2, "dead", 4000, *FIELD, "--steps-per-save", 5, disturb=kill)
    assert killed.code == -signal.SIGKILL and left.code == 2
    (line,) = [line for line in left.stderr.splitlines() if line.startswith("Error: ")]
    assert "Another of the 2 processes of this run has ended" in line and "--load-dir" in line and line.endswith(".")
    assert "Traceback" not in left.text
    for path in folder.iterdir():
        assert torch.load(path, weights_only=True)["step"] == int(path.stem.removeprefix("step-"))


def test_processes_that_drift_apart_do_not_go_on(train_ranks: Any, tmp_path: Path) -> None:
    done = train_ranks(2, "drifting", 12, *FIELD, "--steps-per-save", 4)
    assert [one.code for one in done] == [2, 2]
    errors = [line for one in done for line in one.stderr.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1 and "no longer hold the same parameters" in errors[0] and "after step 4" in errors[0]
    assert not list(tmp_path.rglob("step-*.ckpt"))


@pytest.mark.release
def test_torchrun_starts_ns_train(run_command: Any, tiny_capture: Path, tmp_path: Path) -> None:
    run_command(
        *("torchrun", "--nproc-per-node", 2, "--no-python", BIN / "ns-train", "f3rm-ext-lite", "--data", tiny_capture),
        *("--output-dir", tmp_path, "--experiment-name", "e", "--max-num-iterations", 2, "--vis", "tensorboard"),
        *FIELD,
        fresh=True,
        OMP_NUM_THREADS="1",
    ).succeeds()
    (path,) = tmp_path.rglob("step-*.ckpt")  # in one run folder
    assert [part["rank"] for part in torch.load(path, weights_only=True)["f3rm_ext"]["ranks"]] == [0, 1]


def test_ctrl_c_is_no_success_where_nerfstudio_starts_the_processes(tmp_path: Path, wait_until: Any) -> None:
    program = [sys.executable, str(Path(__file__).with_name("spawned_ranks.py")), str(tmp_path)]
    starter = subprocess.Popen(program, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        wait_until(lambda: all((tmp_path / str(rank)).exists() for rank in range(2)), 120, "both processes")
        os.killpg(starter.pid, signal.SIGINT)  # as a terminal does
        _, said = starter.communicate(timeout=60)
    finally:
        if starter.poll() is None:
            os.killpg(starter.pid, signal.SIGKILL)
    assert starter.returncode == 130, said
    assert "Traceback" not in said


def test_a_mistake_is_said_once(train_ranks: Any, tmp_path: Path) -> None:
    done = train_ranks(2, "wrong", 5, data=tmp_path / "nowhere")
    assert [one.code for one in done] == [2, 2]
    assert (done[0].text + done[1].text).count("Error: ") == 1
    assert "Traceback" not in done[0].text + done[1].text
