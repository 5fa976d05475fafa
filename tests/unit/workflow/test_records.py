"""Reading what a run left behind."""

from pathlib import Path

import pytest

from f3rm_ext.workflow.records import read_json, read_scalars


@pytest.mark.parametrize("content", [None, "", "{", "[1, 2]", "\xff"])
def test_unusable_json_is_empty(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "a.json"
    if content is not None:
        path.write_text(content, encoding="latin-1")
    assert read_json(path) == {}


def test_scalars_of_a_resumed_run_are_one_curve(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    for start in (0, 2):
        with SummaryWriter(str(tmp_path), filename_suffix=str(start)) as writer:
            for step in range(start, start + 3):
                writer.add_scalar("loss", start * 10 + step, step)
    (tmp_path / "events.out.tfevents.0.cut").write_bytes(b"\x01\x02\x03")
    curves = read_scalars(tmp_path)
    assert [step for step, _ in curves["loss"]] == [0, 1, 2, 3, 4]
    assert curves["loss"][-1] == (4.0, 24.0)
    assert read_scalars(tmp_path / "none") == {}
