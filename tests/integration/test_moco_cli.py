"""``f3rm-ext moco`` as a user types it: the table, a training that is stopped and goes on, and bad input."""

import json
import os
import re
import signal
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from f3rm_ext.workflow.records import read_scalars


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moco") / "pictures"
    folder.mkdir()
    random = np.random.default_rng(0)
    for number in range(24):
        squares = random.integers(0, 255, (5, 5, 3), dtype=np.uint8)
        Image.fromarray(squares.repeat(8, axis=0).repeat(8, axis=1)).save(folder / f"{number:02}.png")
    (folder / os.fsdecode(b"damaged.\xe4.jpg")).write_bytes(b"no picture")
    return folder


def test_table_of_pairs(f3rm_ext: Callable[..., Any]) -> None:
    typed = f3rm_ext("moco", "pairs", "--images", 2000, "--processes", 2, "--batch-size", 96, "--json")
    found = json.loads(typed.out)
    row = next(pair for pair in found["pairs"] if pair["queue_size"] == 76_800)
    assert typed.code == 0 and row["batches_in_queue"] == 400 and row["is_multiple"]
    assert [preset["preset"] for preset in found["presets"]][:2] == ["low-vram", "optimized-16gb"]
    told = f3rm_ext("moco", "pairs").out
    assert "Not required" in told and "optimized-16gb" in told
    accumulated = ("--images", 2800, "--batch-size", 64, "--gradient-accumulation-steps", 4)
    found = json.loads(f3rm_ext("moco", "pairs", *accumulated, "--json").out)["pairs"]
    assert [row["queue_size"] for row in found if row["is_advised"]] == [2800 - 256]
    assert (
        "Multiples of 64 next to 70000: 69952 and 70016."
        in f3rm_ext("moco", "pairs", *accumulated, "--queue-size", 70_000).out
    )


def test_the_table_tells_memory_and_time_as_a_plan_does(
    f3rm_ext: Callable[..., Any], pictures: Path, tmp_path: Path
) -> None:
    asked = ("--architecture", "resnet18", "--image-size", 32, "--memory-gib", 2, "--images-per-s", 100)
    given = ("moco", "pairs", "--images", 2000, "--batch-size", 16, *asked)
    small, large = json.loads(f3rm_ext(*given, "--queue-size", 1000, 65_536, "--json").out)["pairs"]
    assert small["hours"] == pytest.approx(2000 * 300 / 100 / 3600)
    assert large["memory_gib"] - small["memory_gib"] == pytest.approx(64_536 * (128 * 4 + 8) / 2**30, rel=0.1)
    assert small["memory_share"] == pytest.approx(small["memory_gib"] / 2)
    plan = f3rm_ext("moco", "train", "--data", pictures, "--output", tmp_path / "run", "--image-size", 32, "--use-amp",
                    True, "--batch-size", 4, "--gradient-accumulation-steps", 4, "--queue-size", 65_536,
                    "--memory-gib", 2, "--device", "cuda", "--plan")  # fmt: skip
    planned = re.search(r"Memory planned: ([\d.]+) of", plan.out)
    assert planned is not None, plan.text
    (again,) = json.loads(f3rm_ext(*given[:5], 4, *asked, "--queue-size", 65_536, "--json").out)["pairs"]
    assert again["memory_gib"] == pytest.approx(float(planned[1]), rel=0.05)
    told = f3rm_ext(*given, "--queue-size", 1000).out
    assert "hours" in told and f"{small['memory_share']:.0%}" in told


def test_the_table_of_any_numbers_takes_no_time(f3rm_ext: Callable[..., Any]) -> None:
    def share(images: int, batch: int, queue: int) -> float:
        seen = range(0, max(1, images - batch + 1), batch)
        return sum(max(0, queue - keys) for keys in seen) / (len(seen) * images)

    for images, batch, queue in ((2000, 96, 76_800), (100, 7, 13), (5, 8, 3), (64, 64, 640), (10**7, 3, 10**6)):
        asked = ("--images", images, "--batch-size", batch, "--queue-size", queue, "--json")
        (row,) = json.loads(f3rm_ext("moco", "pairs", *asked).out)["pairs"]
        assert row["same_image_keys"] == pytest.approx(share(images, batch, queue))
    assert f3rm_ext("moco", "pairs", "--images", 10**12, "--batch-size", 2).code == 0
    assert "--images" in f3rm_ext("moco", "pairs", "--images", 10**20).refuses()


def test_a_plan_trains_and_writes_nothing(f3rm_ext: Callable[..., Any], pictures: Path, tmp_path: Path) -> None:
    given = ("--data", pictures, "--output", tmp_path / "run", "--image-size", 32, "--use-grad-checkpointing", True)
    typed = f3rm_ext("moco", "train", *given, "--batch-size", 8, "--memory-gib", 8, "--device", "cuda", "--plan")
    assert typed.code == 0 and "Memory planned: " in typed.out and "of 8.0 GiB" in typed.out, typed.err
    assert "Optimiser steps: " in typed.out and not (tmp_path / "run").exists()
    timed = f3rm_ext("moco", "train", *given, "--batch-size", 8, "--epochs", 3, "--device", "cpu", "--plan", "--probe")
    steps = int(re.search(r"Optimiser steps: (\d+)", timed.out)[1])  # type: ignore[index]
    said = re.search(r"step takes ([\d.]+) s on this cpu .* about ([\d.]+) hours", timed.out)
    assert timed.code == 0 and said is not None, timed.text
    assert float(said[2]) == pytest.approx(float(said[1]) * steps / 3600, abs=0.02)
    assert not (tmp_path / "run").exists()
    assert "--plan" in f3rm_ext("moco", "train", *given, "--probe").refuses()


class Gone(BaseException):
    """An end that nothing catches."""


def test_only_a_folder_of_its_own_is_written_to(
    f3rm_ext: Callable[..., Any], remember: Callable[[Path], Any], pictures: Path, tmp_path: Path
) -> None:
    (tmp_path / "README.md").write_text("mine")
    for folder, named in ((tmp_path, "README.md"), (pictures, "00.png")):
        before = remember(folder)
        given = ("--data", pictures, "--output", folder, "--batch-size", 8, "--image-size", 32, "--epochs", 1)
        said = f3rm_ext("moco", "train", *given).refuses()
        assert named in said and "--output" in said and before.is_as_it_was()


@pytest.mark.timeout(240)
def test_a_stopped_and_killed_training_ends_as_an_uninterrupted_one(
    f3rm_ext: Callable[..., Any], pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from f3rm_ext.moco.training import Training

    def train(out: Path, *more: object) -> Any:
        given = ["--batch-size", 8, "--queue-size", 21, "--epochs", 2, "--image-size", 32, "--save-every", 2]
        return f3rm_ext("moco", "train", "--data", pictures, "--output", out, *given, *more)

    def last(out: Path) -> dict[str, Any]:
        newest = max((out / "checkpoints").iterdir())
        return torch.load(newest, weights_only=True)

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    typed = train(whole)
    assert typed.code == 0, typed.err
    assert "damaged." in typed.out and "Queue holds 2.6 batches" in typed.out and "Effective batch: 8" in typed.out
    assert "Memory planned: " in typed.out and "Memory of the first pass: " in typed.out

    # Only the training's own steps: the plan of the memory takes steps of Training, too.
    class Interrupted(Training):
        def train_step(self, batches: Any) -> Any:
            os.kill(os.getpid(), signal.SIGINT)
            return super().train_step(batches)

    class Killed(Training):
        def train_step(self, batches: Any) -> Any:
            if self.step == 3:
                raise Gone  # nothing is saved, as after kill -9
            return super().train_step(batches)

    with monkeypatch.context() as patch:
        patch.setattr("f3rm_ext.moco.run.Training", Interrupted)
        typed = train(broken)
        assert typed.code == 130 and "Go on with: f3rm-ext" in typed.out and "--resume" in typed.out
        assert last(broken)["step"] == 1
        patch.setattr("f3rm_ext.moco.run.Training", Killed)
        with pytest.raises(Gone):
            train(broken, "--resume")
        assert last(broken)["step"] == 2
    assert "--resume" in train(broken).refuses()
    typed = train(broken, "--resume")
    assert typed.code == 0 and "Going on at step 2 of 6" in typed.out, typed.err

    one, two = last(whole), last(broken)
    assert one["step"] == two["step"] == 6
    for part in ("query", "key", "queue"):
        for name, value in one[part].items():
            assert torch.equal(value, two[part][name]), f"{part}.{name}"
    assert torch.equal(one["optimizer"]["state"][0]["momentum_buffer"], two["optimizer"]["state"][0]["momentum_buffer"])

    from safetensors.torch import load_file
    from torchvision.models import resnet18

    missing = resnet18(weights=None).load_state_dict(load_file(whole / "backbone.safetensors"), strict=False)
    assert missing.missing_keys == ["fc.weight", "fc.bias"] and not missing.unexpected_keys
    assert "resnet18" in (whole / "README.md").read_text()
    memory = read_scalars(whole)["MoCo/peak_memory_mib"]
    assert memory[0][0] == 1 and all(value > 0 for _, value in memory)
    assert "architecture resnet18" in train(broken, "--resume", "--architecture", "resnet50").refuses()


def test_bad_input_is_one_sentence(f3rm_ext: Callable[..., Any], pictures: Path, tmp_path: Path) -> None:
    def refusal(*more: object, data: Path = pictures) -> str:
        return f3rm_ext("moco", "train", "--data", data, "--output", tmp_path / "run", *more).refuses()

    assert "fewer than a batch of 64: use --batch-size 24." in refusal()
    assert "no folder" in refusal(data=tmp_path / "absent")
    assert "nothing to resume" in refusal("--resume")
    assert "v3 has no queue" in refusal("--algorithm", "v3", "--queue-size", 8)
    assert "--image-size is 8" in refusal("--image-size", 8)
    small = ("--batch-size", 8, "--memory-gib", 0.01)
    assert "A batch of 8 needs" in refusal(*small) and "smaller --image-size" in refusal(*small)


@pytest.mark.timeout(240)
def test_a_full_disk_costs_nothing_that_was_there(
    f3rm_ext: Callable[..., Any], pictures: Path, mount_disk: Callable[[str], Path]
) -> None:
    def train(*more: object) -> Any:
        given = ["--batch-size", 8, "--epochs", 1, "--image-size", 32, "--save-every", 1]
        return f3rm_ext("moco", "train", "--data", pictures, "--output", out, *given, *more)

    disk = mount_disk("600m")  # a checkpoint has 140 MiB
    out, filler = disk / "run", disk / "filler"
    filler.write_bytes(bytes(360 << 20))  # leaves room for one checkpoint
    message = train().refuses()
    assert "step-000000002.ckpt could not be written" in message and "earlier checkpoints are untouched" in message
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-000000001.ckpt"]
    assert not list(out.glob(".*.tmp"))
    filler.unlink()
    typed = train("--resume")
    assert typed.code == 0 and "Going on at step 1 of 3" in typed.out, typed.err
    assert (out / "backbone.safetensors").is_file()


def test_tiles_and_weights_that_do_not_fit_leave_nothing(pictures: Path, mount_disk: Callable[[str], Path]) -> None:
    from f3rm_ext.errors import ConfigError
    from f3rm_ext.moco.encoder import make_backbone
    from f3rm_ext.moco.tiles import prepare
    from f3rm_ext.moco.weights import export

    disk = mount_disk("48k")
    with pytest.raises(ConfigError, match=r"tiles cannot be written .*No space left on device"):
        prepare(pictures, disk, 32)
    facts = {"algorithm": "v2", "architecture": "resnet18", "image_size": 32, "step": 0}
    with pytest.raises(ConfigError, match=r"weights cannot be written .*No space left on device"):
        export(make_backbone("resnet18", 32), disk, facts)
    assert not list(disk.iterdir())


@pytest.mark.timeout(240)
def test_evaluation_of_trained_weights(f3rm_ext: Callable[..., Any], tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for name, low in (("dark", 0), ("light", 140)):
        (tmp_path / "tiles" / name).mkdir(parents=True)
        for number in range(10):
            squares = random.integers(low, low + 110, (5, 5, 3), dtype=np.uint8)
            Image.fromarray(squares.repeat(8, axis=0).repeat(8, axis=1)).save(
                tmp_path / "tiles" / name / f"{number}.png"
            )
    # The beginning of a picture that would take gigabytes.
    parts = (struct.pack(">4sIIBBBBB", b"IHDR", 30_000, 30_000, 8, 2, 0, 0, 0), b"IDAT" + bytes(9))
    chunks = (struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part)) for part in parts)
    huge = tmp_path / "tiles" / "dark" / "huge.png"
    huge.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))
    with pytest.raises(Image.DecompressionBombError):
        Image.open(huge)
    out = tmp_path / "run"
    given = ["--batch-size", 10, "--epochs", 1, "--image-size", 32, "--algorithm", "v3"]
    typed = f3rm_ext("moco", "train", "--data", tmp_path / "tiles", "--output", out, *given)
    assert typed.code == 0 and "v3 has no queue" in typed.out, typed.err
    weights = out / "backbone.safetensors"
    asked = ["--data", tmp_path / "tiles", "--weights", weights, "--image-size", 32, "--seeds", 2]
    typed = f3rm_ext("moco", "eval", *asked, "--json")
    scores = json.loads(typed.out)["scores"]
    networks = ["pre-trained", "pre-trained, all stages", "random weights", "random weights, all stages"]
    assert [score["name"] for score in scores] == [*networks, "colour histograms", "DAISY"]
    assert scores[4]["knn"] == [1.0, 1.0] and all(len(score["linear"]) == 2 for score in scores)
    table = tmp_path / "table.html"
    typed = f3rm_ext("moco", "eval", *asked, "--fine-tune-passes", 1, "--table", table)
    assert "chance 50.0" in typed.out and "fine-tuned" in typed.out
    assert "<td>DAISY</td>" in table.read_text() and "<th>fine-tuned</th>" in table.read_text()
    assert "as .md or .html" in f3rm_ext("moco", "eval", *asked, "--table", tmp_path / "table.pdf").refuses()
    assert "no classes" in f3rm_ext("moco", "eval", "--data", tmp_path / "tiles" / "dark", *asked[2:]).refuses()
    huge.unlink()
    for picture in (tmp_path / "tiles").glob("*/*.png"):
        mask = tmp_path / "masks" / picture.relative_to(tmp_path / "tiles")
        mask.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.uint8(np.asarray(Image.open(picture).convert("L")) > 128)).save(mask)
    masked = (*asked, "--masks", tmp_path / "masks")
    typed = f3rm_ext("moco", "eval", *masked, "--fine-tune-passes", 1)
    assert typed.code == 0 and "20 pictures, 2 classes" in typed.out, typed.err
    assert "mIoU" in typed.out and "fine-tuned" in typed.out
    assert "--imagenet" in f3rm_ext("moco", "eval", *masked, "--imagenet", tmp_path / "x").refuses()


def test_memory_that_runs_out_is_one_sentence(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from f3rm_ext.errors import MemoryShortageError
    from f3rm_ext.moco.options import TrainConfig
    from f3rm_ext.moco.run import Run
    from f3rm_ext.moco.training import Training
    from f3rm_ext.planning.pretraining import plan_memory

    step = Training.train_step

    def short_of_memory(training: Training, batches: Any) -> Any:
        if training.step == 2:
            raise RuntimeError("CUDA error: out of memory")
        return step(training, batches)

    monkeypatch.setattr(Training, "train_step", short_of_memory)
    config = TrainConfig(
        data=pictures, output=tmp_path / "run", batch_size=4, queue_size=8, epochs=9, image_size=32, save_every=1
    )
    with pytest.raises(MemoryShortageError) as raised:
        Run(config, plan_memory).main()
    said = str(raised.value)
    assert said.startswith(
        "Memory ran out in training step 2 on cpu: use --use-amp or --use-grad-checkpointing or "
        "--batch-size 2, and go on from the last checkpoint with f3rm-ext "
    )
    assert said.endswith("--resume.")
