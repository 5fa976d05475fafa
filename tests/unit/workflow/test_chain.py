"""What `sugar run` runs, keeps, resumes and does again; the commands themselves are played by a stand-in."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from f3rm_ext.errors import ConfigError, UserError
from f3rm_ext.workflow import runner
from f3rm_ext.workflow.commands import CommandError, Outcome
from f3rm_ext.workflow.manifest import NAME

RunChain = Callable[..., str]
ALL = [
    "ns-train sugar-ext",
    "export mesh",
    "ns-train sugar-ext-refine",
    "export refined-mesh",
    "export texture",
    "export page",
    "ns-eval",
    "ns-eval",
    "eval mesh",
    "eval texture",
]


def explains(said: str, stage: str, reason: str) -> bool:
    """Whether a line names a stage and why it runs."""
    return any(stage in line.split() and reason in line for line in said.splitlines())


def records(tmp_path: Path) -> dict[str, Any]:
    return json.loads((tmp_path / "out" / NAME).read_text())["stages"]


def test_all_stages_run_in_order_and_not_again(run_chain: RunChain, player: Any, tmp_path: Path) -> None:
    run_chain()
    assert player.names() == ALL
    assert (tmp_path / "out" / "report.html").read_text() == "<html>"
    found = records(tmp_path)
    assert all(record["state"] == "finished" and record["peak_mib"] == 100 for record in found.values())
    assert found["coarse"]["command"].startswith("ns-train sugar-ext --data")
    assert run_chain().count("done before") == len(ALL)
    assert player.ran == []


def test_a_changed_option_does_its_stage_again_and_those_that_depend_on_it(run_chain: RunChain, player: Any) -> None:
    run_chain()
    said = run_chain(texture_size=512)
    assert player.names() == ["export texture", "eval texture"]
    assert explains(said, "texture", "--texture-size is now 512")
    assert explains(said, "eval-texture", "its input (textured mesh) has changed")
    said = run_chain(texture_size=512, passed_on={"coarse": {"max-num-iterations": ("9",)}}, vertices=99)
    assert player.names() == ALL[:-1]  # the stand-in's texture came out as it was
    assert explains(said, "coarse", "--max-num-iterations is now 9")
    assert explains(said, "mesh", "--vertices was 200000 and is now 99")


def test_a_changed_file_that_an_option_names_does_its_stage_again(
    run_chain: RunChain, player: Any, tmp_path: Path
) -> None:
    notes = tmp_path / "notes.json"
    options = {"passed_on": {"page": {"notes": (str(notes),)}}}
    notes.write_text("[]")
    run_chain(**options)
    run_chain(**options)
    assert player.ran == []
    notes.write_text("[1]")
    assert explains(run_chain(**options), "page", "its input (--page.notes) has changed")
    assert player.names() == ["export page"]


def test_a_training_resumes_at_its_checkpoint(run_chain: RunChain, player: Any, tmp_path: Path) -> None:
    player.failures["Coarse splats"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run_chain()
    assert records(tmp_path)["coarse"]["state"] == "running"
    player.failures["Refined splats"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run_chain()
    said = run_chain()
    assert explains(said, "refine", "interrupted") and "50 steps" in said
    trainings = [words for words in player.all if words[0] == "ns-train"]
    assert ["--load-dir" in words for words in trainings] == [False, True, False, True]
    stamps = [words[words.index("--timestamp") + 1] for words in trainings]
    assert stamps[0] == stamps[1] and stamps[2] == stamps[3]
    assert records(tmp_path)["refine"]["runs"] == 2
    assert sum(words[1:3] == ["export", "mesh"] for words in player.all) == 1


def test_a_stage_is_done_again_alone(run_chain: RunChain, player: Any, tmp_path: Path) -> None:
    run_chain()
    said = run_chain(from_stage="texture", until_stage="texture")
    assert player.names() == ["export texture"] and "because --from-stage is texture" in said
    run_chain(from_stage="coarse", until_stage="coarse")
    assert "--load-dir" not in player.ran[0]  # from nothing, in a folder of its own
    runs = tmp_path / "out/runs/coarse/sugar-ext"
    assert len(list(runs.iterdir())) == 2
    run_chain(dense_points="always", until_stage="coarse")
    run_chain(until_stage="coarse")
    assert "--load-dir" in player.ran[0] and len(list(runs.iterdir())) == 3, "the last training with these options"
    run_chain(dense_points="always", until_stage="coarse")
    run_chain(from_stage="coarse", until_stage="coarse")
    assert "--load-dir" not in player.ran[0] and len(list(runs.iterdir())) == 4


def test_stages_are_left_out(run_chain: RunChain, player: Any, tmp_path: Path) -> None:
    run_chain(until_stage="mesh")
    assert player.names() == ALL[:2]
    run_chain(skip_refine=True, skip_eval=True)
    assert player.names() == ["export texture", "export page"]
    assert str(tmp_path / "out" / "mesh.ply") in player.ran[0]
    splats = tmp_path / "splats.ply"
    splats.write_bytes(b"ply")
    run_chain(skip_coarse=True, coarse_checkpoint=splats, output=tmp_path / "other", splats_frame="capture")
    assert player.names() == [*ALL[1:7], *ALL[8:]]
    assert player.ran[0][3:5] == ["--splats", str(splats)] and "capture" in player.ran[0]
    with pytest.raises(ConfigError, match="nothing to do"):
        run_chain(skip_coarse=True, coarse_checkpoint=splats, output=tmp_path / "other", until_stage="clean")


def test_nothing_is_compared_with_photos_where_none_is_held_out(run_chain: RunChain, player: Any) -> None:
    player.eval_images = 0
    run_chain()
    assert player.names() == [*ALL[:6], "eval mesh"]
    run_chain()
    assert player.names() == []


def test_all_is_made_of_the_cleaned_splats(run_chain: RunChain, player: Any, tmp_path: Path) -> None:
    run_chain()
    assert "done before" in run_chain(clean=True)
    assert player.names() == ["splats clean", "ns-eval"], "the stand-in's splats came out as they were"
    run = records(tmp_path)["clean"]["outputs"]["config"]["path"]
    assert run.startswith("clean/") and str(tmp_path / "out" / run) in player.ran[-1]
    run_chain(clean=True, vertices=50)
    mesh, refine = player.ran[:2]
    assert str(tmp_path / "out" / run) in mesh and "/clean/" in refine[refine.index("--pipeline.model.start-from") + 1]
    run_chain(clean=True, passed_on={"coarse": {"max-num-iterations": ("9",)}}, until_stage="clean")
    assert player.names() == ["ns-train sugar-ext", "splats clean"]
    with pytest.raises(ConfigError, match="--clean"):
        run_chain(clean=True, skip_coarse=True, coarse_checkpoint=tmp_path / "splats.ply")


@pytest.mark.parametrize("skipped", ["refined-mesh", "refine"])
def test_a_run_stops_where_a_stage_is_left_out(run_chain: RunChain, player: Any, skipped: Any) -> None:
    run_chain(skip_refine=True, until_stage=skipped)
    assert player.names() == ALL[:2]
    run_chain(skip_refine=True, skip_page=True, until_stage="page")
    assert player.names() == ["export texture"]


def test_the_page_shows_the_splats_of_the_last_training(run_chain: RunChain, player: Any, tmp_path: Path) -> None:
    def shown() -> str:
        (page,) = (words for words in player.ran if words[1:3] == ["export", "page"])
        assert page[page.index("--title") + 1] == "room"
        return Path(page[page.index("--load-config") + 1]).relative_to(tmp_path / "out" / "runs").parts[0]

    asked = {"page": {"text": ("mug", "plant")}}
    run_chain(passed_on=asked)
    assert shown() == "refine" and player.ran[ALL.index("export page")][-3:] == ["--text", "mug", "plant"]
    said = run_chain(passed_on={"page": {"text": ("mug",)}})
    assert player.names() == ["export page"] and explains(said, "page", "--text was mug plant and is now mug")
    run_chain(skip_refine=True)
    assert shown() == "coarse"
    run_chain(skip_refine=True, skip_page=True, from_stage="texture")
    assert "export page" not in player.names()
    run_chain(skip_refine=True, from_stage="page", until_stage="page")
    assert player.names() == ["export page"]
    splats = tmp_path / "splats.ply"
    splats.write_bytes(b"ply")
    run_chain(skip_coarse=True, coarse_checkpoint=splats, skip_refine=True, output=tmp_path / "file")
    assert "export page" not in player.names(), "a file is no run"


def test_a_run_in_place_of_coarse_splats(run_chain: RunChain, player: Any, tmp_path: Path) -> None:
    config = tmp_path / "run" / "config.yml"
    (config.parent / "nerfstudio_models").mkdir(parents=True)
    config.write_text("config")
    with pytest.raises(ConfigError, match="has no checkpoint"):
        run_chain(skip_coarse=True, coarse_checkpoint=config)
    (config.parent / "nerfstudio_models" / "step-000000009.ckpt").write_text("weights")
    run_chain(skip_coarse=True, coarse_checkpoint=config)
    assert player.names() == ALL[1:]
    assert player.ran[0][3:5] == ["--load-config", str(config)]
    link = tmp_path / "config.yml"
    link.symlink_to(config)
    run_chain(skip_coarse=True, coarse_checkpoint=link, output=tmp_path / "of the link")
    (config.parent / "nerfstudio_models" / "step-000000019.ckpt").write_text("better weights")
    assert "because its input (coarse splats) has changed." in run_chain(skip_coarse=True, coarse_checkpoint=config)


def test_a_lost_or_changed_file_is_made_again(run_chain: RunChain, player: Any, tmp_path: Path) -> None:
    run_chain()
    (tmp_path / "out" / "textured.glb").unlink()
    (tmp_path / "out" / "refined-mesh.ply").write_text("edited")
    said = run_chain()
    assert "refined-mesh.ply was changed" in said and "because textured.glb is missing" in said
    assert player.names()[:2] == ["export refined-mesh", "export texture"]


def test_a_failure_leaves_the_manifest_as_it_was(run_chain: RunChain, player: Any, tmp_path: Path) -> None:
    player.failures["Texture"] = CommandError("No photo sees the mesh.")
    with pytest.raises(UserError, match="No photo"):
        run_chain()
    assert [record["state"] for record in records(tmp_path).values()] == ["finished"] * 4 + ["running"]
    run_chain()
    assert player.names()[0] == "export texture"


@pytest.mark.parametrize("first", ["mesh", "texture"])
def test_stages_out_of_order(run_chain: RunChain, first: str) -> None:
    with pytest.raises(ConfigError, match=f"--from-stage {first}.*coarse"):
        run_chain(from_stage=first)


def test_options_of_the_refinement_are_checked_first(run_chain: RunChain, player: Any) -> None:
    run_chain(passed_on={"refine": {"steps-per-save": ("9",)}}, until_stage="coarse", refinement_time="short")
    assert player.ran[0][1:] == [
        *("-m", "f3rm_ext.workflow.check", "sugar-ext-refine"),
        *("--refinement-time", "short", "--steps-per-save", "9"),
    ]
    run_chain(passed_on={"refine": {"steps-per-save": ("9",)}}, until_stage="mesh", refinement_time="short")
    assert player.names() == ["export mesh"]


def test_a_truth_that_is_not_there(run_chain: RunChain, tmp_path: Path, capture: Path) -> None:
    with pytest.raises(ConfigError, match="--truth"):
        run_chain(truth=tmp_path / "none.ply")
    (capture / "gt_mesh.npz").unlink()
    run_chain()
    assert "eval-mesh" not in records(tmp_path)


def test_a_save_leaves_what_a_stage_is_writing_and_a_killed_one_leaves_nothing(
    run_chain: RunChain, player: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_chain(until_stage="coarse")
    folder, file = tmp_path / "out" / ".dense-capture.7.tmp", tmp_path / "out" / ".mesh.ply.8-ab.tmp"
    folder.mkdir()
    for left in (folder / "stereo_points.ply", file):
        left.write_bytes(b"half of it")
    monkeypatch.setattr(runner, "_SAVE_EVERY_S", -1.0)
    found = list[bool]()

    def write(command: Any, where: Path, console: Any) -> Any:
        found.append(folder.exists() or file.exists())
        file.write_bytes(b"half of a new one")
        command.on_poll()
        found.append(file.exists())
        return player(command, where, console)

    monkeypatch.setattr(runner, "run_command", write)
    run_chain(until_stage="mesh")
    assert found == [False, True]


# --- dense points ----------------------------------------------------------------------------------------------------


def test_dense_points_are_an_option_of_the_coarse_training(run_chain: RunChain, player: Any) -> None:
    run_chain(dense_points="always", until_stage="coarse")
    assert player.ran[0][player.ran[0].index("--dense-points") + 1] == "always"
    run_chain(until_stage="coarse")
    assert player.names() == [ALL[0]] and "--dense-points" not in player.ran[0]


# --- photos without poses --------------------------------------------------------------------------------------------


def test_poses_of_photos_come_first_and_the_rest_is_made_of_that_capture(
    run_chain: RunChain, player: Any, photos: Path, tmp_path: Path
) -> None:
    player.notes["Camera poses"] = ["Without a pose: 2.jpg: no matches."]
    given = {"data": None, "images": photos, "passed_on": {"sfm": {"max-size": ("1600",)}}}
    said = run_chain(**given)
    assert player.names() == ["sfm", *(name for name in ALL if name != "eval mesh")]
    capture = str(tmp_path / "out" / "capture")
    assert player.ran[0][1:] == [
        *("sfm", "process", "--images", str(photos), "--output", capture, "--max-size", "1600")
    ]  # fmt: skip
    assert player.ran[1][2:4] == ["--data", capture]
    assert "Without a pose: 2.jpg: no matches." in said
    found = records(tmp_path)["sfm"]
    assert found["notes"] == ["Without a pose: 2.jpg: no matches."] and set(found["outputs"]) == {"poses", "points"}
    assert run_chain(**given).count("done before") == len(ALL) and player.ran == []


def test_a_texture_too_small_for_the_mesh_is_refused_before_anything_runs(run_chain: RunChain, player: Any) -> None:
    for given in (
        {"texture_size": 64, "vertices": 4097},
        {"passed_on": {"texture": {"texture-size": ("64",)}, "mesh": {"vertices": ("5000",)}}},
        {"texture_size": 256},  # for the default of 200,000
    ):
        with pytest.raises(ConfigError, match=r"--texture-size .* --vertices"):
            run_chain(**given)
    assert not player.ran
    run_chain(texture_size=64, vertices=4096, until_stage="mesh")
    run_chain(passed_on={"texture": {"texture-size": ("None",)}, "mesh": {"vertices": ("None",)}}, until_stage="mesh")


def test_a_command_that_writes_nothing_is_told(
    run_chain: RunChain, player: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_chain(until_stage="coarse")
    monkeypatch.setattr(runner, "run_command", lambda *_: Outcome(1.0, 1.0, False, 100.0, []))
    with pytest.raises(ConfigError, match=r"mesh\.ply"):
        run_chain(until_stage="mesh")


def test_a_photo_that_is_added_finds_poses_again_in_the_same_folder(
    run_chain: RunChain, player: Any, photos: Path
) -> None:
    run_chain(data=None, images=photos, until_stage="mesh")
    (photos / "3.jpg").write_bytes(b"a new photo")
    said = run_chain(data=None, images=photos, until_stage="mesh")
    assert player.names() == ["sfm", *ALL[:2]]
    assert explains(said, "sfm", "its input (photos) has changed")
    assert explains(said, "coarse", "its input (capture) has changed")


def test_poses_found_again_that_are_the_same_train_nothing(
    run_chain: RunChain, player: Any, photos: Path, tmp_path: Path
) -> None:
    run_chain(data=None, images=photos, until_stage="coarse")
    (tmp_path / "out" / "capture" / "gt_mesh.npz").write_text("of the user")
    run_chain(data=None, images=photos, from_stage="sfm", until_stage="sfm")
    assert player.ran[-1][-1] == "--start-over", "the stage itself keeps the capture until another is whole"
    assert (tmp_path / "out" / "capture" / "gt_mesh.npz").exists()
    run_chain(data=None, images=photos, until_stage="coarse")
    assert player.ran == []


def test_a_copy_of_a_photo_that_was_deleted_is_made_again(
    run_chain: RunChain, player: Any, photos: Path, tmp_path: Path
) -> None:
    run_chain(data=None, images=photos, until_stage="coarse")
    name = min(path.name for path in photos.iterdir())
    (tmp_path / "out" / "capture" / name).unlink()
    said = run_chain(data=None, images=photos, until_stage="coarse")
    assert player.names() == ["sfm"] and "--start-over" not in player.ran[0]
    assert explains(said, "sfm", f"{name} is missing")


def test_a_pose_stage_that_was_killed_goes_on(run_chain: RunChain, player: Any, photos: Path, tmp_path: Path) -> None:
    player.failures["Camera poses"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run_chain(data=None, images=photos)
    kept = tmp_path / "out" / "capture" / "database.db"
    kept.parent.mkdir(exist_ok=True)
    kept.write_bytes(b"features")
    run_chain(data=None, images=photos, until_stage="sfm")
    assert kept.exists() and records(tmp_path)["sfm"]["runs"] == 2


def test_options_of_both_trainings_are_checked_before_poses_are_found(
    run_chain: RunChain, player: Any, photos: Path
) -> None:
    steps = {"steps-per-save": ("9",)}
    given = {"data": None, "images": photos, "until_stage": "sfm", "passed_on": {"coarse": steps, "refine": steps}}
    run_chain(**given)
    assert [words[3] for words in player.ran[:2]] == ["sugar-ext", "sugar-ext-refine"]
    assert player.names()[2:] == ["sfm"]
    run_chain(**given)
    assert player.ran == []
    run_chain(data=None, images=photos, until_stage="sfm", regularization="sdf")
    assert "f3rm_ext.workflow.check" in player.ran[0] and "--regularization" in player.ran[0]


def test_paths_in_options_of_stages_are_relative_to_where_the_user_is(
    run_chain: RunChain, player: Any, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "masks").mkdir()
    monkeypatch.chdir(tmp_path)
    options = {"sfm": {"masks": ("masks",)}, "refine": {"steps-per-save": ("9",)}}
    run_chain(data=None, images=photos, passed_on=options)
    first = player.ran[1]  # before it, the options of the refinement are checked
    assert first[first.index("--masks") + 1] == "masks" and (player.folders[1] / "masks").is_dir()
    assert set(player.folders) == {tmp_path}
