"""Reading what a run left behind."""

import json
from pathlib import Path

import pytest

from f3rm_ext.workflow.records import lpips_reason, plain_text, read_json, read_scalars


@pytest.mark.parametrize("content", [None, "", "{", "[1, 2]", "\xff"])
def test_unusable_json_is_empty(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "a.json"
    if content is not None:
        path.write_text(content, encoding="latin-1")
    assert read_json(path) == {}


def test_json_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"a": 1}))
    assert read_json(tmp_path / "a.json") == {"a": 1}


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


def test_no_events_no_curves(tmp_path: Path) -> None:
    assert read_scalars(tmp_path) == {}


def test_reason_for_missing_lpips(tmp_path: Path) -> None:
    log = tmp_path / "eval.log"
    assert lpips_reason(log) == ""
    log.write_text("start\n\x1b[1;33mWarning: LPIPS is left out: no network here.\x1b[0m\nend\n")
    assert lpips_reason(log) == "LPIPS is left out: no network here."
    log.write_text("all well\n")
    assert lpips_reason(log) == ""


def test_color_codes_are_removed() -> None:
    assert plain_text("\x1b[2K\x1b[1;32mdone\x1b[0m\n") == "done\n"
