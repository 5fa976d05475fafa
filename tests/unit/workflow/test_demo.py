"""What the demo runs, keeps and runs again; the commands themselves are played by a stand-in."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from f3rm_ext.errors import ConfigError
from f3rm_ext.html.content import ReportContent
from f3rm_ext.utils.atomic_files import FolderLock
from f3rm_ext.workflow import demo as module
from f3rm_ext.workflow.commands import Command, Outcome
from f3rm_ext.workflow.demo import DemoOptions, DemoRun, fresh_folder


class Player:
    """Stands in for run_command: writes what the commands would write, and remembers them."""

    def __init__(self, measured: dict[str, Any]) -> None:
        self.measured = measured
        self.ran: list[list[str]] = []
        self.reach: int | None = None
        """Training ends at this step by Ctrl-C."""

    def __call__(self, command: Command, folder: Path, console: Console) -> Outcome:
        words = [str(word) for word in command.arguments]
        self.ran.append(words)
        if words[:3] == ["f3rm-ext", "scene", "synth"]:
            self._synthesise(folder / words[3], words[4:])
        elif words[:3] == ["f3rm-ext", "sfm", "process"]:
            assert command.on_line("Finding features: 3 of 16") == (3, 16, "Finding features: 3 of 16")
            out = folder / words[words.index("--output") + 1]
            out.mkdir(exist_ok=True)
            (out / "transforms.json").write_text(json.dumps({"frames": [], "w": 4000, "h": 3000}))
        elif words[:3] == ["f3rm-ext", "features", "lift"]:
            assert (folder / words[4]).parent.is_dir()
        elif words[0] == "ns-train":
            self._train(folder, words)
        elif words[0] == "ns-eval":
            results = {"psnr": 20.0, "ssim": 0.5, "l1": 0.1}
            (folder / words[words.index("--output-path") + 1]).write_text(json.dumps({"results": results}))
        else:
            out = folder / words[words.index("--out") + 1]
            out.mkdir(exist_ok=True)
            (out / "measure.json").write_text(json.dumps(self.measured))
        return Outcome(1.0, 1.0, False)

    def _synthesise(self, capture: Path, options: list[str]) -> None:
        given = dict(zip(options[::2], options[1::2], strict=False))
        wanted = {name: value for name, value in vars(DemoOptions(Path()).room).items() if name != "overwrite"}
        assert all(str(wanted[name[2:].replace("-", "_")]) == value for name, value in given.items())
        capture.mkdir(exist_ok=True)
        (capture / "scene.json").write_text(json.dumps({"options": wanted}))
        (capture / "transforms.json").write_text("{}")

    def _train(self, folder: Path, words: list[str]) -> None:
        def value(name: str) -> str:
            return words[words.index(name) + 1]

        run = folder / value("--output-dir") / value("--experiment-name") / words[1] / value("--timestamp")
        (run / "nerfstudio_models").mkdir(parents=True, exist_ok=True)
        steps = self.reach or int(value("--max-num-iterations"))
        (run / "nerfstudio_models" / f"step-{steps - 1:09d}.ckpt").touch()
        if self.reach:
            raise KeyboardInterrupt

    def programs(self) -> list[str]:
        return [Path(words[0]).name for words in self.ran]


@pytest.fixture
def player(monkeypatch: pytest.MonkeyPatch, make_content: Callable[..., ReportContent]) -> Player:
    player = Player(make_content().measured)
    monkeypatch.setattr(module, "run_command", player)
    return player


def run(out: Path, **options: Any) -> tuple[Path, str]:
    console = Console(file=io.StringIO(), width=200)
    report = DemoRun(DemoOptions(out=out, **options), console).run()
    return report, console.file.getvalue()  # type: ignore[attr-defined]


def test_everything_is_run_once_in_order(tmp_path: Path, player: Player) -> None:
    report, _ = run(tmp_path / "demo", steps=30)
    assert player.programs()[:3] == ["f3rm-ext", "ns-train", "ns-eval"]
    assert len(player.ran) == 4 and player.programs()[3].startswith("python")
    text = report.read_text()
    for words in player.ran[:3]:
        assert words[0] in text
    assert "--max-num-iterations 30" in text and str(tmp_path) not in text


def capture_of(folder: Path, photos: int, **more: Any) -> Path:
    """A capture as far as the demo looks at it."""
    folder.mkdir()
    meta = {"frames": [{"file_path": f"{i}.jpg"} for i in range(photos)], "w": 320, "h": 240, **more}
    (folder / "transforms.json").write_text(json.dumps(meta))
    return folder


POINTS = {"ply_file_path": "sparse_pc.ply"}


def test_few_photos_train_splats_which_are_queried_too(tmp_path: Path, player: Player) -> None:
    data = capture_of(tmp_path / "banana", 11, **POINTS)
    report, said = run(tmp_path / "demo", data=data)
    train, lift = player.ran[:2]
    assert train[:2] == ["ns-train", "sugar-ext-lite"] and train[train.index("--max-num-iterations") + 1] == "1200"
    assert not any("rays-per-batch" in word or "extractors" in word for word in train)
    assert lift[:3] == ["f3rm-ext", "features", "lift"] and lift[-2:] == ["--extractors", "dense-daisy"]
    assert player.programs()[2] == "ns-eval" and player.programs()[3].startswith("python")
    assert "--method f3rm-ext-lite" in said and "Gaussian splats" in report.read_text()
    player.ran.clear()
    run(tmp_path / "demo", data=data)
    assert player.ran == []
    run(tmp_path / "demo", data=data, extractors=("labels",))
    assert player.ran[1][-2:] == ["--extractors", "labels"]


@pytest.mark.parametrize(
    ("photos", "more", "method"),
    [(200, POINTS, "auto"), (11, {}, "f3rm-ext-lite"), (11, POINTS, "f3rm-ext-lite")],
)
def test_a_field_is_trained_on_many_photos_and_on_request(
    tmp_path: Path, player: Player, photos: int, more: dict[str, str], method: str
) -> None:
    _, said = run(tmp_path / "demo", data=capture_of(tmp_path / "fox", photos, **more), method=method)
    train = player.ran[0]
    assert train[:2] == ["ns-train", "f3rm-ext-lite"] and train[train.index("--max-num-iterations") + 1] == "3000"
    assert player.programs()[1] == "ns-eval" and "--method" not in said


def test_splats_are_trained_on_request(tmp_path: Path, player: Player) -> None:
    run(tmp_path / "demo", steps=30, method="sugar-ext-lite")
    assert player.ran[1][:2] == ["ns-train", "sugar-ext-lite"] and player.ran[2][1:3] == ["features", "lift"]


def test_the_same_command_again_runs_nothing(tmp_path: Path, player: Player) -> None:
    run(tmp_path / "demo", steps=30)
    player.ran.clear()
    report, said = run(tmp_path / "demo", steps=30)
    assert player.ran == [] and said.count("done before") == 4
    assert report.read_text().count("done before, reused") == 4


def test_photos_without_poses_get_them_first_and_once(tmp_path: Path, player: Player) -> None:
    photos = tmp_path / "banana"
    photos.mkdir()
    (photos / "a.jpg").write_bytes(b"a")
    run(tmp_path / "demo", steps=30, images=photos)
    assert player.ran[0] == ["f3rm-ext", "sfm", "process", "--images", str(photos), "--output", "posed"]
    assert player.ran[1][:4] == ["ns-train", "f3rm-ext-lite", "--data", "posed"]
    assert player.ran[1][-2:] == ["--pipeline.datamanager.camera-res-scale-factor", "0.1"]
    assert (tmp_path / "demo" / "runs" / "banana").is_dir()
    player.ran.clear()
    run(tmp_path / "demo", steps=30, images=photos)
    assert player.ran == []
    (photos / "b.jpg").write_bytes(b"b")
    run(tmp_path / "demo", steps=30, images=photos)
    assert player.programs()[0] == "f3rm-ext"


@pytest.mark.parametrize(
    ("option", "given"), [("images", "fox/images"), ("data", "fox"), ("data", "fox/transforms.json")]
)
def test_runs_have_the_name_of_the_capture(tmp_path: Path, player: Player, option: str, given: str) -> None:
    (tmp_path / "fox" / "images").mkdir(parents=True)
    (tmp_path / "fox" / "images" / "a.jpg").write_bytes(b"a")
    (tmp_path / "fox" / "transforms.json").write_text("{}")
    report, _ = run(tmp_path / "demo", steps=30, **{option: tmp_path / given})
    assert [path.name for path in (tmp_path / "demo" / "runs").iterdir()] == ["fox"]
    assert "--load-config runs/fox/" in report.read_text()


def test_a_run_with_another_name_is_kept(tmp_path: Path, player: Player) -> None:
    """Earlier versions called runs after the folder of the photos, such as images."""
    run(tmp_path / "demo", steps=30)
    runs = tmp_path / "demo" / "runs"
    (runs / "room").rename(runs / "images")
    player.ran.clear()
    run(tmp_path / "demo", steps=40)
    assert "--load-dir" in player.ran[0] and [path.name for path in runs.iterdir()] == ["images"]


def test_an_interrupted_training_goes_on(tmp_path: Path, player: Player) -> None:
    player.reach = 12
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "demo", steps=30)
    player.reach = None
    player.ran.clear()
    report, said = run(tmp_path / "demo", steps=30)
    assert player.programs()[0] == "ns-train", "the capture is made again"
    assert "--load-dir" in player.ran[0] and "after 12 steps" in said
    assert "in 2 runs" in report.read_text()


def test_more_steps_train_on_and_measure_again(tmp_path: Path, player: Player) -> None:
    run(tmp_path / "demo", steps=30)
    player.ran.clear()
    run(tmp_path / "demo", steps=40)
    assert player.programs()[:2] == ["ns-train", "ns-eval"] and "--load-dir" in player.ran[0]
    player.ran.clear()
    run(tmp_path / "demo", steps=20)
    assert player.ran == [], "fewer steps than there are ask for nothing"


def test_other_options_are_another_run(tmp_path: Path, player: Player) -> None:
    run(tmp_path / "demo", steps=30)
    player.ran.clear()
    run(tmp_path / "demo", steps=30, scale=0.5)
    assert "--load-dir" not in player.ran[0]
    assert player.ran[0][-2:] == ["--pipeline.datamanager.camera-res-scale-factor", "0.5"]
    assert len(list((tmp_path / "demo" / "runs" / "room" / "f3rm-ext-lite").iterdir())) == 2


def test_another_exemplar_asks_again_and_trains_nothing(tmp_path: Path, player: Player) -> None:
    run(tmp_path / "demo", steps=30)
    player.ran.clear()
    run(tmp_path / "demo", steps=30, exemplar="vase")
    assert len(player.ran) == 1 and player.ran[0][-2:] == ["--exemplar", "vase"]


def test_what_was_deleted_is_made_again(tmp_path: Path, player: Player) -> None:
    run(tmp_path / "demo", steps=30)
    player.ran.clear()
    next((tmp_path / "demo").rglob("eval.json")).unlink()
    run(tmp_path / "demo", steps=30)
    assert player.programs() == ["ns-eval"]


def test_training_ends_at_its_time_limit_and_more_time_goes_on(
    tmp_path: Path, player: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = []

    def slow(command: Command, folder: Path, console: Console) -> Outcome:
        if command.arguments[0] != "ns-train":
            return player(command, folder, console)
        limits.append(command.limit_s)
        player.reach = 70 * len(limits)
        with pytest.raises(KeyboardInterrupt):
            player(command, folder, console)
        player.reach = None
        return Outcome(command.limit_s + 5, command.limit_s + 1, True)

    monkeypatch.setattr(module, "run_command", slow)
    report, _ = run(tmp_path / "demo", steps=1000, minutes=2.0)
    assert "70 steps of 1000: stopped at the limit of 2 min" in report.read_text()
    _, said = run(tmp_path / "demo", steps=1000, minutes=2.0)
    assert limits == [120.0] and "70 steps" in said, "the time is spent"
    report, _ = run(tmp_path / "demo", steps=1000, minutes=3.0)
    assert limits == [120.0, 59.0] and "140 steps of 1000" in report.read_text()


def test_a_folder_of_others_is_refused(tmp_path: Path, player: Player) -> None:
    (tmp_path / "mine.txt").touch()
    with pytest.raises(ConfigError, match="holds files that are not of a demo"):
        run(tmp_path)
    assert player.ran == []


def test_two_demos_do_not_share_a_folder(tmp_path: Path, player: Player) -> None:
    (tmp_path / "demo").mkdir()
    with FolderLock(tmp_path / "demo" / ".lock").hold(), pytest.raises(ConfigError, match="Another demo"):
        run(tmp_path / "demo")
    assert player.ran == []


def test_fresh_folders_are_new(tmp_path: Path) -> None:
    assert fresh_folder(tmp_path / "demo") == tmp_path / "demo"
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo-2").touch()
    assert fresh_folder(tmp_path / "demo") == tmp_path / "demo-3"


@pytest.mark.parametrize(
    ("meta", "folders", "expected"),
    [
        ({"w": 320, "h": 240, "frames": []}, [], 1.0),
        ({"w": 540, "h": 960, "frames": []}, [], 0.42),
        ({"frames": [{"file_path": "a.png", "w": 100, "h": 4000}]}, [], 0.1),
        ({"w": 4000, "h": 3000, "frames": []}, ["images_2", "images_4"], 0.4),
        ({"w": 4000, "h": 3000, "frames": []}, ["images_2"], 0.2),
        ({"frames": "broken"}, [], 1.0),
        ({}, [], 1.0),
    ],
)
def test_captures_are_reduced_to_about_400_px(
    tmp_path: Path, meta: dict[str, Any], folders: list[str], expected: float
) -> None:
    (tmp_path / "transforms.json").write_text(json.dumps(meta))
    for name in folders:
        (tmp_path / name).mkdir()
    options = DemoOptions(out=tmp_path / "demo", data=tmp_path)
    assert DemoRun(options, Console(file=io.StringIO())).scale(str(tmp_path)) == pytest.approx(expected)
    options.scale = 0.7
    assert DemoRun(options, Console(file=io.StringIO())).scale(str(tmp_path)) == 0.7
