"""Commands that write a file replace what they wrote themselves, and nothing else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from f3rm_ext.ledger.ledger import Ledger

COMMANDS = {
    "sfm eval": ("--predicted", "{data}", "--truth", "{data}", "--out", "{mine}.json"),
    "eval mesh": ("{data}/gt_mesh.ply", "--truth", "{data}/gt_mesh.ply", "--out", "{mine}.json"),
    "eval texture": ("{data}/gt_mesh.ply", "--data", "{data}", "--out", "{mine}.json"),
    "eval texture --pictures": ("{data}/gt_mesh.ply", "--data", "{data}", "--views", "test", "--pictures", "{folder}"),
    "moco eval": ("--data", "{data}", "--weights", "none", "--table", "{mine}.md"),
    "bench report": ("--ledger", "{ledger}", "--out", "{mine}.html"),
    "export texture": ("--data", "{data}", "--mesh", "{data}/gt_mesh.ply", "--out", "{mine}.glb"),
    "export texture (picture)": ("--data", "{data}", "--mesh", "{data}/gt_mesh.ply", "--out", "{ours}.obj"),
    "export mesh": ("--load-config", "{run}", "--out", "{mine}.ply"),
    "export page": ("--load-config", "{run}", "--out", "{mine}.html"),
    "export features": ("--load-config", "{run}", "--out", "{mine}.ply"),
    "export features (arrays)": ("--load-config", "{run}", "--out", "{ours}.ply"),
    "query": ("--load-config", "{run}", "--text", "mug", "--out", "{folder}"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_files_of_others_stay(
    f3rm_ext: Callable[..., Any],
    remember: Callable[[Path], Any],
    tiny_capture: Path,
    untrained: Any,
    tmp_path: Path,
    command: str,
) -> None:
    Ledger(tmp_path / "ledger.sqlite").add("base", "f3rm-ext-lite")
    folder = tmp_path / "mine"
    folder.mkdir()
    for suffix in (".json", ".md", ".html", ".glb", ".ply", ".txt"):
        (folder / f"mine{suffix}").write_text("mine")
    (folder / "ours.obj").write_text("# made_by: f3rm-ext export mesh\nv 0 0 0\n")
    for name in ("ours.png", "ours.npz", "test-0001.png", "overview.png"):
        (folder / name).write_bytes(b"mine, too")
    before = remember(folder)
    places = {"data": tiny_capture, "mine": folder / "mine", "ours": folder / "ours", "folder": folder}
    places |= {"ledger": tmp_path / "ledger.sqlite", "run": untrained.config}
    arguments = [word.format(**places) for word in COMMANDS[command]]
    words = command.partition(" (")[0].partition(" --")[0].split()
    option = next(word for word in arguments if word in ("--out", "--table", "--pictures"))
    said = f3rm_ext(*words, *arguments).refuses()
    assert str(folder) in said and option in said and before.is_as_it_was()
