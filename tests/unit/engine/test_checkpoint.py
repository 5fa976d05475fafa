"""Checkpoint files: what is in them, how they are written and which one is chosen."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from f3rm_ext.engine import checkpoint
from f3rm_ext.errors import CheckpointError


def make(folder: Path, step: int, damaged: bool = False) -> Path:
    path = checkpoint.path_of(folder, step)
    checkpoint.write({"step": step, "pipeline": {"w": torch.ones(1000)}, "optimizers": {}}, path)
    if damaged:
        os.truncate(path, path.stat().st_size - 300)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "nerfstudio_models"


class TestPlain:
    def test_turns_numpy_into_python_and_tensors(self) -> None:
        value = checkpoint.plain(
            {"lr": np.float64(0.5), "list": [np.int32(3), (np.bool_(True),)], np.str_("key"): np.arange(3)}
        )
        assert value["lr"] == 0.5 and type(value["lr"]) is float
        assert type(value["list"][0]) is int and value["list"][1] == (True,) and type(value["list"][1][0]) is bool
        assert torch.equal(value["key"], torch.arange(3))
        assert all(type(key) is str for key in value)

    def test_keeps_tensors_themselves(self) -> None:
        tensor = torch.zeros(2)
        assert checkpoint.plain({"a": [tensor]})["a"][0] is tensor

    def test_result_loads_in_plain_torch_without_safe_globals(self, tmp_path: Path) -> None:
        path = tmp_path / "models" / "step-000000001.ckpt"
        checkpoint.write({"_last_lr": [np.float64(1e-3)], "pos": np.int64(2), "key": np.ones(2, np.float32)}, path)
        code = (
            "import sys, torch; state = torch.load(sys.argv[1], weights_only=True);"
            "assert 'f3rm_ext' not in sys.modules; print(state['_last_lr'], state['pos'], state['key'].tolist())"
        )
        result = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        assert result.stdout.split() == ["[0.001]", "2", "[1.0,", "1.0]"]


class TestIsIntact:
    def test_complete_file(self, folder: Path) -> None:
        path = make(folder, 1)
        assert checkpoint.is_intact(path) and checkpoint.is_intact(path, read_all=False)

    def test_truncated_file(self, folder: Path) -> None:
        path = make(folder, 1, damaged=True)
        assert not checkpoint.is_intact(path) and not checkpoint.is_intact(path, read_all=False)

    def test_empty_and_absent_files(self, tmp_path: Path) -> None:
        empty = tmp_path / "step-000000001.ckpt"
        empty.touch()
        assert not checkpoint.is_intact(empty)
        assert not checkpoint.is_intact(tmp_path / "none.ckpt")

    def test_changed_bytes_are_seen_only_when_all_is_read(self, folder: Path) -> None:
        path = make(folder, 1)
        content = bytearray(path.read_bytes())
        at = content.index(np.ones(8, np.float32).tobytes())
        content[at : at + 8] = b"\0" * 8
        path.write_bytes(content)
        assert checkpoint.is_intact(path, read_all=False)
        assert not checkpoint.is_intact(path)


class TestWrite:
    def test_leaves_only_the_checkpoint(self, folder: Path) -> None:
        make(folder, 7)
        assert [path.name for path in folder.iterdir()] == ["step-000000007.ckpt"]
        assert [path.name for path in folder.parent.iterdir()] == ["nerfstudio_models"]

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
        with pytest.raises(CheckpointError, match=r"could not be written .*earlier checkpoints are untouched"):
            checkpoint.write({"step": 1}, path)
        assert path.read_bytes() == before
        assert list(folder.parent.iterdir()) == [folder]

    def test_other_errors_are_not_taken_for_a_full_disk(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object) -> None:
            raise RuntimeError("CUDA error")

        monkeypatch.setattr(torch, "save", fail)
        with pytest.raises(RuntimeError, match="CUDA error"):
            checkpoint.write({}, checkpoint.path_of(folder, 1))
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
        for step in (3, 12, 5):
            make(folder, step)
        (folder / "notes.txt").touch()
        assert [step for step, _ in checkpoint.newest_first(folder)] == [12, 5, 3]
        assert checkpoint.newest_first(folder / "none") == []

    def test_steps_of_more_than_nine_digits(self, folder: Path) -> None:
        path = make(folder, 12_345_678_901)
        assert checkpoint.step_of(path) == 12_345_678_901
        assert checkpoint.newest_first(folder) == [(12_345_678_901, path)]

    def test_damaged_ones_are_passed_over(self, folder: Path) -> None:
        good = make(folder, 4)
        bad = [make(folder, step, damaged=True) for step in (8, 6)]
        warnings: list[str] = []
        assert checkpoint.newest_intact(folder, warnings.append) == good
        assert all(path.name in warnings[0] for path in (good, *bad))

    def test_none_intact(self, folder: Path) -> None:
        make(folder, 8, damaged=True)
        with pytest.raises(CheckpointError, match=r"Every checkpoint in .* is damaged .step-000000008.ckpt."):
            checkpoint.newest_intact(folder, print)

    def test_none_at_all(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        with pytest.raises(CheckpointError, match=r"There is no checkpoint in .*--load-dir"):
            checkpoint.newest_intact(folder, print)

    def test_prune_keeps_the_newest_and_one_spare(self, folder: Path) -> None:
        for step in (1, 2, 3, 4):
            make(folder, step)
        checkpoint.prune(folder)
        assert [step for step, _ in checkpoint.newest_first(folder)] == [4, 3]

    def test_prune_never_counts_a_damaged_one_as_spare(self, folder: Path) -> None:
        for step in (1, 2, 4):
            make(folder, step)
        make(folder, 3, damaged=True)
        checkpoint.prune(folder)
        assert [step for step, _ in checkpoint.newest_first(folder)] == [4, 2]


class TestFindFolder:
    def test_run_folder_and_checkpoint_folder_mean_the_same(self, folder: Path) -> None:
        make(folder, 1)
        relative = Path("nerfstudio_models/")
        assert checkpoint.find_folder(folder, relative) == folder
        assert checkpoint.find_folder(folder.parent, relative) == folder

    def test_missing_folder(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="none given by --load-dir does not exist"):
            checkpoint.find_folder(tmp_path / "none", Path("m"))

    @pytest.mark.parametrize(
        ("name", "option"), [("config.yml", "--load-config"), ("step-000000001.ckpt", "--load-checkpoint")]
    )
    def test_file_instead_of_folder_names_the_right_option(self, tmp_path: Path, name: str, option: str) -> None:
        (tmp_path / name).touch()
        with pytest.raises(CheckpointError, match=f"takes a folder: use {option}"):
            checkpoint.find_folder(tmp_path / name, Path("m"))


class TestLoad:
    def test_reads_what_was_written(self, folder: Path) -> None:
        state = checkpoint.load(make(folder, 5))
        assert state["step"] == 5 and torch.equal(state["pipeline"]["w"], torch.ones(1000))

    def test_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="does not exist"):
            checkpoint.load(tmp_path / "step-000000001.ckpt")

    def test_damaged_file(self, folder: Path) -> None:
        with pytest.raises(CheckpointError, match=r"cannot be read .*--load-step"):
            checkpoint.load(make(folder, 1, damaged=True))

    def test_file_of_something_else(self, tmp_path: Path) -> None:
        torch.save({"weights": torch.ones(1)}, tmp_path / "x.ckpt")
        with pytest.raises(CheckpointError, match="not a checkpoint of a nerfstudio run"):
            checkpoint.load(tmp_path / "x.ckpt")

    def test_never_runs_code_of_the_file(self, tmp_path: Path) -> None:
        mark = tmp_path / "ran"

        class Evil:
            def __reduce__(self) -> tuple:
                return Path.touch, (mark,)

        torch.save({"step": 1, "pipeline": Evil(), "optimizers": {}}, tmp_path / "evil.ckpt")
        with pytest.raises(CheckpointError):
            checkpoint.load(tmp_path / "evil.ckpt")
        assert not mark.exists()
