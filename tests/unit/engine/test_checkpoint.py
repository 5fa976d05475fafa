"""Checkpoint files: what is in them, how they are written and which one is chosen."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from f3rm_ext.engine import checkpoint
from f3rm_ext.errors import CheckpointError


def make(folder: Path, step: int, damaged: bool = False) -> Path:
    path = checkpoint.make_path(folder, step)
    checkpoint.write({"step": step, "pipeline": {"w": torch.ones(1000)}, "optimizers": {}}, path)
    if damaged:
        os.truncate(path, path.stat().st_size - 300)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "nerfstudio_models"


class TestPlain:
    def test_turns_numpy_into_python_and_tensors(self) -> None:
        tensor = torch.zeros(2)
        value = checkpoint.plain(
            {"lr": np.float64(0.5), "list": [np.int32(3), (np.bool_(True),), tensor], np.str_("key"): np.arange(3)}
        )
        assert value["list"][2] is tensor
        assert value["lr"] == 0.5 and type(value["lr"]) is float
        assert type(value["list"][0]) is int and value["list"][1] == (True,) and type(value["list"][1][0]) is bool
        assert torch.equal(value["key"], torch.arange(3))
        assert all(type(key) is str for key in value)


class TestIsIntact:
    def test_complete_truncated_empty_and_absent_files(self, folder: Path) -> None:
        whole, truncated = make(folder, 1), make(folder, 2, damaged=True)
        (folder / "empty.ckpt").touch()
        for path in (whole, truncated, folder / "empty.ckpt", folder / "none.ckpt"):
            assert checkpoint.is_intact(path) == checkpoint.is_intact(path, read_all=False) == (path == whole)

    def test_changed_bytes_are_seen_only_when_all_is_read(self, folder: Path) -> None:
        path = make(folder, 1)
        content = bytearray(path.read_bytes())
        at = content.index(np.ones(8, np.float32).tobytes())
        content[at : at + 8] = b"\0" * 8
        path.write_bytes(content)
        assert checkpoint.is_intact(path, read_all=False)
        assert not checkpoint.is_intact(path)


class TestWrite:
    @pytest.mark.parametrize(
        "error", [OSError(28, "No space left on device"), RuntimeError("PytorchStreamWriter failed")]
    )
    def test_full_disk_is_one_sentence_and_keeps_what_was_there(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
    ) -> None:
        path = make(folder, 1)
        before = path.read_bytes()

        def fail(_: object, file: object) -> None:
            file.write(b"half")  # type: ignore[attr-defined]
            raise error

        monkeypatch.setattr(torch, "save", fail)
        with pytest.raises(CheckpointError, match=re.escape(str(folder))):
            checkpoint.write({"step": 1}, path)
        assert path.read_bytes() == before
        assert list(folder.parent.iterdir()) == [folder]

    def test_other_errors_are_not_taken_for_a_full_disk(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object) -> None:
            raise RuntimeError("CUDA error")

        monkeypatch.setattr(torch, "save", fail)
        with pytest.raises(RuntimeError, match="CUDA error"):
            checkpoint.write({}, checkpoint.make_path(folder, 1))
        assert list(folder.parent.iterdir()) == [folder]

    def test_removes_what_a_killed_process_left_but_not_what_a_running_one_writes(self, folder: Path) -> None:
        process = subprocess.Popen([sys.executable, "-c", ""])
        process.wait()
        folder.mkdir(parents=True)
        dead = folder.parent / f".step-000000003.ckpt.{process.pid}.tmp"
        alive = folder.parent / f".step-000000003.ckpt.{os.getppid()}.tmp"
        for path in (dead, alive):
            path.touch()
        make(folder, 4)
        assert not dead.exists() and alive.exists()


class TestChoice:
    def test_newest_first_ignores_other_names(self, folder: Path) -> None:
        for step in (3, 12_345_678_901, 5):
            assert checkpoint.parse_step(make(folder, step)) == step
        (folder / "notes.txt").touch()
        assert [step for step, _ in checkpoint.newest_first(folder)] == [12_345_678_901, 5, 3]
        assert checkpoint.newest_first(folder / "none") == []

    def test_damaged_ones_are_passed_over(self, folder: Path) -> None:
        good = make(folder, 4)
        bad = [make(folder, step, damaged=True) for step in (8, 6)]
        warnings: list[str] = []
        assert checkpoint.newest_intact(folder, warnings.append) == good
        assert all(path.name in warnings[0] for path in (good, *bad))

    def test_any_damage_is_noticed(self, folder: Path) -> None:
        path = make(folder, 4)
        data, random = path.read_bytes(), np.random.default_rng(0)
        for place in random.integers(0, len(data), 300):
            damaged = bytearray(data)
            damaged[place] ^= 1 << random.integers(8)
            path.write_bytes(damaged)
            checkpoint.is_intact(path)  # raises nothing

    def test_none_intact(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        with pytest.raises(CheckpointError, match="--load-dir"):
            checkpoint.newest_intact(folder, print)
        make(folder, 8, damaged=True)
        with pytest.raises(CheckpointError, match=r"damaged .step-000000008.ckpt"):
            checkpoint.newest_intact(folder, print)

    def test_prune_keeps_the_newest_and_one_spare_that_is_not_damaged(self, folder: Path) -> None:
        for step in (1, 2, 4):
            make(folder, step)
        make(folder, 3, damaged=True)
        checkpoint.prune(folder)
        assert [step for step, _ in checkpoint.newest_first(folder)] == [4, 2]

    def test_set_aside_moves_what_another_training_left_after_a_step(self, folder: Path) -> None:
        assert checkpoint.set_aside(folder, 0) is None, "no folder yet"
        for step in (1, 2, 4):
            make(folder, step)
        assert checkpoint.set_aside(folder, 5) is None
        first = checkpoint.set_aside(folder, 2)
        assert first is not None and first.parent == folder.parent
        assert [step for step, _ in checkpoint.newest_first(first)] == [4, 2]
        assert [step for step, _ in checkpoint.newest_first(folder)] == [1]
        second = checkpoint.set_aside(folder, 0)
        assert second is not None and second != first and [step for step, _ in checkpoint.newest_first(second)] == [1]


class TestFindFolder:
    def test_run_folder_and_checkpoint_folder_mean_the_same(self, folder: Path) -> None:
        make(folder, 1)
        relative = Path("nerfstudio_models/")
        assert checkpoint.find_folder(folder, relative) == folder
        assert checkpoint.find_folder(folder.parent, relative) == folder

    def test_missing_folder(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"none .*--load-dir"):
            checkpoint.find_folder(tmp_path / "none", Path("m"))

    @pytest.mark.parametrize(
        ("name", "option"), [("config.yml", "--load-config"), ("step-000000001.ckpt", "--load-checkpoint")]
    )
    def test_file_instead_of_folder_names_the_right_option(self, tmp_path: Path, name: str, option: str) -> None:
        (tmp_path / name).touch()
        with pytest.raises(CheckpointError, match=f"{name}.*{option}"):
            checkpoint.find_folder(tmp_path / name, Path("m"))


class TestLoad:
    def test_other_files_are_one_sentence(self, folder: Path) -> None:
        make(folder, 1, damaged=True)
        torch.save({"weights": torch.ones(1)}, folder / "other.ckpt")
        for name, reason in (
            ("step-000000001.ckpt", "--load-step"),
            ("none.ckpt", "does not exist"),
            ("other.ckpt", "not a checkpoint"),
        ):
            with pytest.raises(CheckpointError, match=f"{name}.*{reason}"):
                checkpoint.load(folder / name)

    def test_never_runs_code_of_the_file(self, tmp_path: Path) -> None:
        mark = tmp_path / "ran"

        class Evil:
            def __reduce__(self) -> tuple:
                return Path.touch, (mark,)

        torch.save({"step": 1, "pipeline": Evil(), "optimizers": {}}, tmp_path / "evil.ckpt")
        with pytest.raises(CheckpointError):
            checkpoint.load(tmp_path / "evil.ckpt")
        assert not mark.exists()
