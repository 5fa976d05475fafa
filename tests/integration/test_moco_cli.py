"""``f3rm-ext moco`` as a user types it: the table, plans, bad input, full disks and evaluations."""

import json
import os
import re
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from f3rm_ext.errors import ConfigError, MemoryShortageError
from f3rm_ext.moco.encoder import make_backbone
from f3rm_ext.moco.weights import export

FACTS = {"algorithm": "v2", "architecture": "resnet18", "image_size": 32, "step": 0}


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
    found = json.loads(typed.stdout)
    row = next(pair for pair in found["pairs"] if pair["queue_size"] == 76_800)
    assert typed.code == 0 and row["batches_in_queue"] == 400 and row["is_multiple"]
    assert [preset["preset"] for preset in found["presets"]][:2] == ["low-vram", "optimized-16gb"]
    told = f3rm_ext("moco", "pairs").stdout
    assert "Not required" in told and "optimized-16gb" in told
    accumulated = ("--images", 2800, "--batch-size", 64, "--gradient-accumulation-steps", 4)
    found = json.loads(f3rm_ext("moco", "pairs", *accumulated, "--json").stdout)["pairs"]
    assert [row["queue_size"] for row in found if row["is_advised"]] == [2800 - 256]
    assert (
        "Multiples of 64 next to 70000: 69952 and 70016."
        in f3rm_ext("moco", "pairs", *accumulated, "--queue-size", 70_000).stdout
    )
    assert f3rm_ext("moco", "pairs", "--images", 10**12, "--batch-size", 2).code == 0, "it takes no time"
    assert "--images" in f3rm_ext("moco", "pairs", "--images", 10**20).refuses()


def test_the_table_tells_memory_and_time(f3rm_ext: Callable[..., Any]) -> None:
    given = ("moco", "pairs", "--images", 2000, "--batch-size", 16, "--queue-size", 1000)
    (row,) = json.loads(f3rm_ext(*given, "--images-per-s", 100, "--json").stdout)["pairs"]
    assert row["hours"] == pytest.approx(2000 * 300 / 100 / 3600) and "memory_gib" not in row
    told = f3rm_ext(*given, "--images-per-s", 100, "--architecture", "resnet18", "--image-size", 32, "--memory-gib", 2)
    assert "hours" in told.stdout
    (gib, share) = next(line.split()[-3:-1] for line in told.stdout.splitlines() if line.split()[:2] == ["16", "1000"])
    assert float(share[:-1]) == pytest.approx(100 * float(gib) / 2, abs=0.6)


def test_a_plan_trains_and_writes_nothing(f3rm_ext: Callable[..., Any], pictures: Path, tmp_path: Path) -> None:
    given = ("--data", pictures, "--output", tmp_path / "run", "--image-size", 32, "--use-grad-checkpointing", True)
    typed = f3rm_ext("moco", "train", *given, "--batch-size", 8, "--memory-gib", 8, "--device", "cuda", "--plan")
    assert typed.code == 0 and "Memory planned: " in typed.stdout and "of 8.0 GiB" in typed.stdout, typed.stderr
    assert "Optimiser steps: " in typed.stdout and not (tmp_path / "run").exists()
    timed = f3rm_ext("moco", "train", *given, "--batch-size", 8, "--epochs", 3, "--device", "cpu", "--plan", "--probe")
    steps = int(re.search(r"Optimiser steps: (\d+)", timed.stdout)[1])  # type: ignore[index]
    said = re.search(r"step takes ([\d.]+) s on this cpu .* about ([\d.]+) hours", timed.stdout)
    assert timed.code == 0 and said is not None, timed.text
    assert float(said[2]) == pytest.approx(float(said[1]) * steps / 3600, abs=0.02)
    assert not (tmp_path / "run").exists()
    assert "--plan" in f3rm_ext("moco", "train", *given, "--probe").refuses()


def test_only_a_folder_of_its_own_is_written_to(
    f3rm_ext: Callable[..., Any], remember: Callable[[Path], Any], pictures: Path, tmp_path: Path
) -> None:
    (tmp_path / "README.md").write_text("mine")
    (tmp_path / "checkpoints").mkdir()  # as somebody would copy it
    (tmp_path / "checkpoints" / "step-000000001.ckpt").write_bytes(b"copied")
    for folder, named, more in ((tmp_path, "README.md", ("--resume",)), (pictures, "00.png", ())):
        before = remember(folder)
        given = ("--data", pictures, "--output", folder, "--batch-size", 8, "--image-size", 32, "--epochs", 1)
        said = f3rm_ext("moco", "train", *given, *more).refuses()
        assert named in said and "--output" in said and before.is_as_it_was()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ((), ("--batch-size 24",)),
        (("--data", "absent"), ("absent",)),
        (("--resume",), ("--resume",)),
        (("--algorithm", "v3", "--queue-size", 8), ("--queue-size", "v3")),
        (("--image-size", 8), ("--image-size is 8",)),
        (("--batch-size", 8, "--memory-gib", 0.01), ("batch of 8", "--image-size")),
    ],
)
def test_bad_input_is_one_sentence(
    options: tuple[object, ...], named: tuple[str, ...], f3rm_ext: Callable[..., Any], pictures: Path, tmp_path: Path
) -> None:
    said = f3rm_ext("moco", "train", "--data", pictures, "--output", tmp_path / "run", *options).refuses()
    assert all(words in said for words in named)


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
    assert "step-000000002.ckpt" in train().refuses()
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-000000001.ckpt"]
    assert not list(out.glob(".*.tmp"))
    filler.unlink()
    typed = train("--resume")
    assert typed.code == 0 and "step 1 of 3" in typed.stdout, typed.stderr
    assert (out / "backbone.safetensors").is_file()


def test_tiles_and_weights_that_do_not_fit_leave_nothing(pictures: Path, mount_disk: Callable[[str], Path]) -> None:
    from f3rm_ext.moco.tiles import prepare

    disk = mount_disk("48k")
    with pytest.raises(ConfigError, match="No space left"):
        prepare(pictures, disk, 32)
    with pytest.raises(ConfigError, match="No space left"):
        export(make_backbone("resnet18", 32), disk, FACTS)
    assert not list(disk.iterdir())


@pytest.mark.timeout(240)
def test_evaluation_of_weights(f3rm_ext: Callable[..., Any], tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for name, low in (("dark", 0), ("light", 140)):
        (tmp_path / "tiles" / name).mkdir(parents=True)
        for number in range(10):
            squares = random.integers(low, low + 110, (5, 5, 3), dtype=np.uint8)
            Image.fromarray(squares.repeat(8, axis=0).repeat(8, axis=1)).save(
                tmp_path / "tiles" / name / f"{number}.png"
            )
    # The beginning of a picture that would take gigabytes.
    parts = (struct.pack(">4sIIBBBBB", b"IHDR", 40_000, 40_000, 8, 2, 0, 0, 0), b"IDAT" + bytes(9))
    chunks = (struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part)) for part in parts)
    huge = tmp_path / "tiles" / "dark" / "huge.png"
    huge.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))
    with pytest.raises(Image.DecompressionBombError):
        Image.open(huge)
    torch.manual_seed(0)
    weights = export(make_backbone("resnet18", 32), tmp_path, FACTS)
    asked = ["--data", tmp_path / "tiles", "--weights", weights, "--image-size", 32, "--seeds"]
    typed = f3rm_ext("moco", "eval", *asked, 2, "--json")
    scores = json.loads(typed.stdout)["scores"]
    networks = ["pre-trained", "pre-trained, all stages", "random weights", "random weights, all stages"]
    assert [score["name"] for score in scores] == [*networks, "colour histograms", "DAISY"]
    assert scores[4]["knn"] == [1.0, 1.0] and all(len(score["linear"]) == 2 for score in scores)
    table = tmp_path / "table.html"
    asked.append(1)
    typed = f3rm_ext("moco", "eval", *asked, "--fine-tune-passes", 1, "--table", table)
    assert "chance 50.0" in typed.stdout and "fine-tuned" in typed.stdout
    assert "DAISY" in table.read_text() and "fine-tuned" in table.read_text()
    assert "table.pdf" in f3rm_ext("moco", "eval", *asked, "--table", tmp_path / "table.pdf").refuses()
    assert "no classes" in f3rm_ext("moco", "eval", "--data", tmp_path / "tiles" / "dark", *asked[2:]).refuses()
    huge.unlink()
    for picture in (tmp_path / "tiles").glob("*/*.png"):
        mask = tmp_path / "masks" / picture.relative_to(tmp_path / "tiles")
        mask.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.uint8(np.asarray(Image.open(picture).convert("L")) > 128)).save(mask)
    masked = (*asked, "--masks", tmp_path / "masks")
    typed = f3rm_ext("moco", "eval", *masked, "--fine-tune-passes", 1)
    assert typed.code == 0 and "20 pictures, 2 classes" in typed.stdout, typed.stderr
    assert "mIoU" in typed.stdout and "fine-tuned" in typed.stdout
    assert "--imagenet" in f3rm_ext("moco", "eval", *masked, "--imagenet", tmp_path / "x").refuses()


def test_memory_that_runs_out_is_one_sentence(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from f3rm_ext.moco.options import TrainConfig
    from f3rm_ext.moco.run import TrainingRun
    from f3rm_ext.moco.training import Training

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
        TrainingRun(config).main()
    said = str(raised.value)
    assert "step 2 on cpu" in said and re.search(r"`f3rm-ext .*--resume`", said)
    assert re.search("--use-grad-checkpointing .*--use-amp .*--batch-size 2 ", said)
