"""``f3rm-ext moco train`` in several processes: started as torchrun does, and by the options of the original MoCo."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torchvision.models import resnet18

from f3rm_ext.workflow.records import read_scalars


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moco_ranks")
    random = np.random.default_rng(0)
    for number in range(24):
        # Noise: batch norm of even pictures magnifies rounding errors.
        Image.fromarray(random.integers(0, 255, (40, 40, 3), dtype=np.uint8)).save(folder / f"{number:02}.png")
    (folder / os.fsdecode(b"damaged.\xe4.jpg")).write_bytes(b"no picture")
    return folder


@pytest.fixture
def train(command_server: Any, pictures: Path, tmp_path: Path) -> Callable[..., list[Any]]:
    def start(ranks: int, output: str, *options: object, disturb: Any = None) -> list[Any]:
        words = ("--data", pictures, "--output", tmp_path / output, "--image-size", 32, "--epochs", 2)
        processes = command_server.start_ranks(ranks, "f3rm-ext", "moco", "train", *words, *options)
        if disturb is not None:
            disturb(processes)
        return command_server.finish_ranks(120)

    return start


def last(folder: Path) -> dict[str, Any]:
    return torch.load(max((folder / "checkpoints").iterdir()), weights_only=True)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("algorithm", ["v2", pytest.param("v3", marks=pytest.mark.release)])
def test_two_processes_equal_one_with_the_double_batch(
    train: Callable[..., list[Any]], tmp_path: Path, algorithm: str
) -> None:
    options = ("--algorithm", algorithm, *(("--queue-size", 21) if algorithm == "v2" else ()))
    for ranks, batch in ((1, 8), (2, 4)):
        done = train(ranks, str(ranks), "--batch-size", batch, "--epochs", 1, *options)
        assert [each.code for each in done] == [0] * ranks, done[0].text[-3000:]
    assert "Effective batch: 8 (4 × 2 processes × 1 accumulated)" in done[0].stdout and not done[1].stdout
    one, two = last(tmp_path / "1"), last(tmp_path / "2")
    assert one["step"] == two["step"] == 3
    for part in ("query", "key", "predictor", "queue"):
        assert one[part].keys() == two[part].keys()
        for name, value in one[part].items():
            torch.testing.assert_close(
                two[part][name], value, atol=1e-4, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.release
@pytest.mark.timeout(240)
def test_one_interrupted_process_stops_all_and_they_go_on(
    train: Callable[..., list[Any]], tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    def interrupt(processes: list[int]) -> None:
        wait_until((tmp_path / "part" / "checkpoints" / "step-000000002.ckpt").is_file, 60, "a checkpoint")
        os.kill(processes[1], signal.SIGINT)

    options = ("--batch-size", 4, "--save-every", 2)
    done = train(2, "part", *options, "--epochs", 400, disturb=interrupt)
    assert [each.code for each in done] == [130, 130], done[0].text[-3000:] + done[1].text[-3000:]
    assert "torchrun --nproc-per-node 2 --no-python f3rm-ext moco train" in done[0].stdout
    assert "Traceback" not in done[0].text + done[1].text
    stopped = last(tmp_path / "part")["step"]
    epochs = stopped // 3 + 1
    done = train(2, "part", *options, "--epochs", epochs, "--resume")
    assert [each.code for each in done] == [0, 0], done[0].text[-3000:]
    assert last(tmp_path / "part")["step"] == 3 * epochs
    wrong = train(2, "part", *options)
    assert [each.code for each in wrong] == [2, 2] and (wrong[0].text + wrong[1].text).count("Error: ") == 1


@pytest.mark.timeout(240)
def test_a_training_killed_while_it_saves_goes_on_as_if_it_had_not_been(
    train: Callable[..., list[Any]], tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    options = ("--batch-size", 8, "--queue-size", 13, "--epochs", 3, "--save-every", 2)
    folder = tmp_path / "killed" / "checkpoints"

    def kill(processes: list[int]) -> None:
        wait_until((folder / "step-000000004.ckpt").is_file, 60, "a checkpoint")
        wait_until(lambda: halted_while_it_saves(processes[0]), 60, "a checkpoint that is being written")
        os.kill(processes[0], signal.SIGKILL)

    def halted_while_it_saves(process: int) -> bool:
        os.kill(process, signal.SIGSTOP)
        if unfinished():
            return True
        os.kill(process, signal.SIGCONT)
        return False

    def unfinished() -> list[Path]:
        return list((tmp_path / "killed").glob(".step-*.tmp"))

    (killed,) = train(1, "killed", *options, disturb=kill)
    assert killed.code == -signal.SIGKILL and len(unfinished()) == 1
    for options_now, output in ((("--resume",), "killed"), ((), "whole")):
        (done,) = train(1, output, *options, *options_now)
        done.succeeds()
    assert not unfinished()
    one, two = last(tmp_path / "killed"), last(tmp_path / "whole")
    assert one["step"] == two["step"] == 9
    for part in ("query", "key", "queue"):
        for name, value in one[part].items():
            assert torch.equal(value, two[part][name]), f"{part}.{name}"
    assert torch.equal(one["optimizer"]["state"][0]["momentum_buffer"], two["optimizer"]["state"][0]["momentum_buffer"])

    for said in ("damaged.", "Queue holds 1.6 batches", "Memory planned: ", "Memory of the first pass: "):
        assert said in done.text
    missing = resnet18(weights=None).load_state_dict(
        load_file(tmp_path / "whole" / "backbone.safetensors"), strict=False
    )
    assert missing.missing_keys == ["fc.weight", "fc.bias"] and not missing.unexpected_keys
    assert "resnet18" in (tmp_path / "whole" / "README.md").read_text()
    memory = read_scalars(tmp_path / "whole")["MoCo/peak_memory_mib"]
    assert memory[0][0] == 1 and all(value > 0 for _, value in memory)
    (refused,) = train(1, "whole", *options, "--resume", "--architecture", "resnet50")
    refused.refuses("--architecture resnet18")


@pytest.mark.release
@pytest.mark.timeout(240)
def test_where_one_dies_the_other_ends_with_a_sentence(
    train: Callable[..., list[Any]], tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    def kill(processes: list[int]) -> None:
        wait_until((tmp_path / "dead" / "checkpoints" / "step-000000002.ckpt").is_file, 60, "a checkpoint")
        os.kill(processes[1], signal.SIGKILL)

    left, killed = train(2, "dead", "--batch-size", 4, "--save-every", 2, "--epochs", 400, disturb=kill)
    assert killed.code == -signal.SIGKILL and left.code == 2
    (line,) = [line for line in left.stderr.splitlines() if line.startswith("Error: ")]
    assert "2 processes" in line and "--resume" in line
    assert "Traceback" not in left.text


@pytest.mark.timeout(240)
def test_options_of_the_original_start_torchrun(
    run_command: Callable[..., Any], pictures: Path, tmp_path: Path
) -> None:
    words = ("f3rm-ext", "moco", "train", "--data", pictures, "--output", tmp_path / "out", "--epochs", 1)
    words += ("--batch-size", 12, "--image-size", 32, "--multiprocessing-distributed", "--world-size")
    done = run_command(*words, 1, "--rank", 0)
    assert done.code == 0 and last(tmp_path / "out")["step"] == 2, done.text[-3000:]
    assert "--rank is 2" in run_command(*words, 2, "--rank", 2).text
