"""What the demo runs, keeps and runs again; the commands themselves are played by a stand-in."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from f3rm_ext.errors import ConfigError
from f3rm_ext.utils.atomic_files import FolderLock
from f3rm_ext.utils.output_folder import new_folder
from f3rm_ext.workflow.demo import DemoRun
from f3rm_ext.workflow.manifest import NAME
from f3rm_ext.workflow.options import DemoOptions

ALL = ["scene synth", "ns-train f3rm-ext-lite", "ns-eval", "-m"]


@pytest.fixture
def run(player: Any, tmp_path: Path) -> Any:
    """Runs the demo with options; gives its report and what it said. The list of commands begins anew."""

    def run(**options: Any) -> tuple[str, str]:
        player.forget()
        console = Console(file=io.StringIO(), width=200)
        report = DemoRun(DemoOptions(**{"out": tmp_path / "demo", "steps": 30, **options}), console).run()
        return report.read_text(), console.file.getvalue()  # type: ignore[attr-defined]

    return run


def capture_of(folder: Path, photos: int) -> Path:
    """A capture as far as the demo looks at it."""
    folder.mkdir()
    meta = {"frames": [{"file_path": f"{i}.jpg"} for i in range(photos)], "w": 4000, "h": 3000}
    (folder / "transforms.json").write_text(json.dumps(meta))
    return folder


def value(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]


def test_everything_runs_once_in_order(run: Any, player: Any, tmp_path: Path) -> None:
    page, _ = run()
    assert player.names() == ALL
    assert value(player.ran[0], "--num-images") == "40" and "--seed" not in player.ran[0]
    assert "--pipeline.datamanager.camera-res-scale-factor" not in player.ran[1]
    assert all(words[0] in page for words in player.ran[:3])
    assert "--max-num-iterations 30" in page and "30 steps" in page and str(tmp_path) not in page
    page, said = run()
    assert player.ran == [] and said.count("done before") == 4
    assert page.count("done before, reused") == 4


@pytest.mark.parametrize(("photos", "splats"), [(11, True), (20, True), (21, False)])
def test_few_photos_train_splats_which_are_queried_too(
    run: Any, player: Any, tmp_path: Path, photos: int, splats: bool
) -> None:
    _, said = run(data=capture_of(tmp_path / "banana", photos))
    page = run(data=tmp_path / "banana")[0]
    assert ('href="page.html"' in page) == splats and player.ran == []
    player.ran = player.all
    if splats:
        assert player.names() == ["ns-train sugar-ext-lite", "features lift", *ALL[2:], "export page"]
        assert value(player.ran[-1], "--title") == "banana"
        assert value(player.ran[1], "--extractors") == "dense-daisy" and f"{photos} photos are few" in said
    else:
        assert player.names() == ALL[1:]
    assert value(player.ran[0], "--pipeline.datamanager.camera-res-scale-factor") == "0.1"


def test_photos_that_are_held_out_do_not_count(run: Any, player: Any, tmp_path: Path) -> None:
    data = capture_of(tmp_path / "banana", 30)
    meta = json.loads((data / "transforms.json").read_text())
    names = [frame["file_path"] for frame in meta["frames"]]
    meta |= {"train_filenames": names[:9], "val_filenames": names[9:]}
    (data / "transforms.json").write_text(json.dumps(meta))
    _, said = run(data=data)
    assert player.names()[0] == "ns-train sugar-ext-lite" and "9 photos are few" in said


def test_without_held_out_photos_the_training_views_are_shown(run: Any, player: Any, tmp_path: Path) -> None:
    player.eval_images = player.measured["eval_images"] = 0
    data = capture_of(tmp_path / "banana", 9)
    page, _ = run(data=data)
    assert player.names() == ["ns-train sugar-ext-lite", "features lift", "-m", "export page"]
    assert "Training views" in page and "eld-out views" not in page
    page, _ = run(data=data)
    assert player.ran == [] and "Training views" in page


def test_the_method_is_chosen_on_request(run: Any, player: Any, tmp_path: Path) -> None:
    run(method="sugar-ext-lite", extractors=("clip", "dinov2"))
    assert player.names()[1:3] == ["ns-train sugar-ext-lite", "features lift"]
    assert player.ran[2][-3:] == ["--extractors", "clip", "dinov2"] and "clip" not in player.ran[1]
    run(method="sugar-ext-lite", extractors=("dinov2",))
    assert player.names() == ["features lift", *ALL[2:], "export page"]
    run(data=capture_of(tmp_path / "banana", 3), method="f3rm-ext-lite", extractors=("clip",), scale=0.5)
    assert value(player.ran[0], "--pipeline.datamanager.features.extractors") == "clip"
    assert value(player.ran[0], "--pipeline.datamanager.camera-res-scale-factor") == "0.5"
    run(data=tmp_path / "banana", method="f3rm-ext-lite", scale=1.0)
    assert value(player.ran[0], "--pipeline.datamanager.camera-res-scale-factor") == "1", "or the method reduces them"


@pytest.mark.parametrize(
    ("thing", "asked"), [(None, "a.jpg:3.5,4"), ("mug", "mug=a.jpg:3.5,4"), ("(mug/cup)", "mug cup=a.jpg:3.5,4")]
)
def test_the_page_asks_what_the_report_asks(run: Any, player: Any, thing: str | None, asked: str) -> None:
    player.measured["query"] |= {"object": thing, "exemplar": "a.jpg:3.5,4"}
    run(method="sugar-ext-lite")
    assert value(player.ran[-1], "--exemplar") == asked


def test_a_checkpoint_that_lifting_rewrites_is_kept(run: Any, player: Any, tmp_path: Path) -> None:
    run(method="sugar-ext-lite")
    next((tmp_path / "demo").rglob("*.ckpt")).write_text("with features")
    run(method="sugar-ext-lite")
    assert player.ran == []


def test_photos_without_poses_get_them_first_and_once(run: Any, player: Any, photos: Path, tmp_path: Path) -> None:
    run(images=photos)
    assert player.names()[:2] == ["sfm", "ns-train sugar-ext-lite"]
    assert value(player.ran[0], "--images") == str(photos)
    assert value(player.ran[1], "--data") == value(player.ran[0], "--output")
    run(images=photos)
    assert player.ran == []
    (photos / "4.jpg").write_bytes(b"new")
    run(images=photos)
    assert player.names()[:2] == ["sfm", "ns-train sugar-ext-lite"]
    run()
    assert player.names() == ALL, "the folder may be used for another capture"


def test_an_output_folder_among_the_photos_does_not_count_as_photos(run: Any, player: Any, photos: Path) -> None:
    for _ in range(2):
        run(images=photos, out=photos / "demo")
    assert player.ran == []


@pytest.mark.parametrize("given", ["fox", "fox/transforms.json"])
def test_runs_have_the_name_of_the_capture(run: Any, tmp_path: Path, given: str) -> None:
    capture_of(tmp_path / "fox", 30)
    page, _ = run(data=tmp_path / given)
    assert [path.name for path in (tmp_path / "demo" / "runs").iterdir()] == ["fox"]
    assert "--load-config runs/fox/" in page


def test_more_steps_train_on_and_measure_again(run: Any, player: Any) -> None:
    run()
    run(steps=40)
    assert player.names() == ALL[1:] and "--load-dir" in player.ran[0]
    run(steps=20)
    assert player.ran == [], "fewer steps than there are ask for nothing"


def test_other_options_are_another_run(run: Any, player: Any, tmp_path: Path) -> None:
    run()
    run(scale=0.5)
    assert player.names() == ALL[1:] and "--load-dir" not in player.ran[0]
    assert len(list((tmp_path / "demo" / "runs" / "room" / "f3rm-ext-lite").iterdir())) == 2
    run(scale=0.5, exemplar="vase")
    assert player.names() == ["-m"] and player.ran[0][-2:] == ["--exemplar", "vase"]


def test_a_room_that_was_changed_is_made_again_in_its_place(run: Any, player: Any, tmp_path: Path) -> None:
    run()
    (tmp_path / "demo" / "capture" / "scene.json").write_text("changed")
    run()
    assert player.names()[0] == ALL[0] and "--overwrite" in player.ran[0]


def test_training_ends_at_its_time_limit_and_more_time_resumes_it(run: Any, player: Any) -> None:
    player.reach = 70
    page, _ = run(steps=1000, minutes=2.0)
    assert player.limits_s == [120] and "70 steps of 1000: stopped at the limit of 2 min" in page
    run(steps=1000, minutes=2.0)
    assert player.ran == [], "the time is spent"
    player.reach = 140
    page, _ = run(steps=1000, minutes=3.0)
    assert player.limits_s == [59] and "140 steps of 1000" in page and player.names() == ALL[1:]


def test_a_training_without_a_checkpoint_needs_more_time(run: Any, player: Any, tmp_path: Path) -> None:
    run()
    player.reach = 0  # the next one is stopped before it saves one
    with pytest.raises(ConfigError, match="--minutes"):
        run(scale=0.5)
    player.reach = None
    run(scale=0.5)
    assert player.names() == ALL[1:]


def test_folders_of_others_and_of_a_running_demo_are_refused(run: Any, player: Any, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").touch()
    with pytest.raises(ConfigError, match=r"mine\.txt.*--out"):
        run(out=tmp_path / "other")
    (tmp_path / "demo").mkdir()
    with FolderLock(tmp_path / "demo" / ".lock").hold(), pytest.raises(ConfigError, match="Another `f3rm-ext demo`"):
        run()
    (tmp_path / "demo" / NAME).write_text('{"made_by": "f3rm-ext sugar run"}')
    with pytest.raises(ConfigError, match=NAME):
        run()
    assert player.ran == []


def test_fresh_folders_are_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert new_folder(tmp_path / "demo") == tmp_path / "demo"
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo-2").touch()
    assert new_folder(tmp_path / "demo") == tmp_path / "demo-3"
    monkeypatch.chdir(tmp_path / "demo")
    assert new_folder(Path(".")) == tmp_path / "demo-3" and new_folder(Path("new")) == Path("new")
    assert new_folder(Path("..")).name == f"{tmp_path.name}-2"
