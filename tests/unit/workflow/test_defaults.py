"""What `sugar run` chooses on a machine without a GPU, and what it says before it begins."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from f3rm_ext.errors import ConfigError
from f3rm_ext.workflow.commands import CommandError
from f3rm_ext.workflow.defaults import choose_scale, longest_side_px
from f3rm_ext.workflow.manifest import NAME

RunChain = Callable[..., str]


@pytest.fixture(autouse=True)
def _no_gpu(player: Any) -> None:
    player.device_type = "cpu"


def commands(player: Any, program: str) -> list[str]:
    return [" ".join(words) for words in player.ran if words[0] == program]


def test_small_splats_a_short_refinement_and_small_photos(run_chain: RunChain, player: Any, capture: Path) -> None:
    meta = json.loads((capture / "transforms.json").read_text())
    (capture / "transforms.json").write_text(json.dumps({**meta, "w": 1600, "h": 1200}))
    said = run_chain()
    coarse, refine = commands(player, "ns-train")
    assert coarse.startswith("ns-train sugar-ext-lite") and "--resolution-scale 0.25" in coarse
    assert "--refinement-time short" in refine and "--resolution-scale 0.25" in refine
    assert "--vertices 30000" in commands(player, "f3rm-ext")[0]
    for chosen in ("--coarse-method sugar-ext-lite", "--resolution-scale 0.25", "--refinement-time short"):
        assert chosen in said


def test_photos_without_poses_are_reduced_by_their_own_size(run_chain: RunChain, player: Any, photos: Path) -> None:
    for path in photos.iterdir():
        Image.fromarray(np.zeros((80, 800, 3), np.uint8)).save(path)
    run_chain(data=None, images=photos)
    assert all("--resolution-scale 0.5" in command for command in commands(player, "ns-train"))


def test_a_video_is_reduced_by_the_size_of_its_frames(run_chain: RunChain, player: Any, tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    path = tmp_path / "clip.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 800, 80, "yuv420p"
        for _ in range(3):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((80, 800, 3), np.uint8), format="rgb24")))
        container.mux(stream.encode())
    run_chain(data=None, images=path)
    assert all("--resolution-scale 0.5" in command for command in commands(player, "ns-train"))
    assert f"--images {path}" in commands(player, "f3rm-ext")[0]


def test_a_video_that_ends_before_its_first_frame_is_left_to_the_command_that_reads_it(
    run_chain: RunChain, player: Any, tmp_path: Path
) -> None:
    av = pytest.importorskip("av")
    path = tmp_path / "clip.mp4"
    with av.open(str(path), "w", options={"movflags": "faststart"}) as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 800, 80, "yuv420p"
        container.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((80, 800, 3), np.uint8), format="rgb24")))
        container.mux(stream.encode())
    content = path.read_bytes()
    path.write_bytes(content[: content.index(b"mdat") + 4])
    run_chain(data=None, images=path)
    assert f"--images {path}" in commands(player, "f3rm-ext")[0]


def test_what_is_given_wins(run_chain: RunChain, player: Any, capture: Path) -> None:
    (capture / "transforms.json").write_text(json.dumps({"frames": [], "w": 1600, "h": 1200}))
    run_chain(
        coarse_method="sugar-ext",
        vertices=99,
        passed_on={
            "coarse": {"pipeline.datamanager.camera-res-scale-factor": ("0.5",)},
            "refine": {"max-num-iterations": ("9",)},
        },
    )
    coarse, refine = commands(player, "ns-train")
    assert coarse.startswith("ns-train sugar-ext ") and "--refinement-time" not in refine
    assert "--resolution-scale" not in coarse + refine
    assert "--vertices 99" in commands(player, "f3rm-ext")[0]


def test_a_chain_goes_on_as_it_was_begun(run_chain: RunChain, player: Any, tmp_path: Path) -> None:
    run_chain(until_stage="coarse")
    assert json.loads((tmp_path / "out" / NAME).read_text())["defaults"]["coarse_method"] == "sugar-ext-lite"
    player.device_type = "cuda"  # on another machine
    run_chain()
    (refine,) = commands(player, "ns-train")
    assert "--refinement-time short" in refine


def test_the_time_is_told_once_before_the_first_training(run_chain: RunChain, player: Any, tmp_path: Path) -> None:
    player.failures["Refined splats"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run_chain()
    (words,) = player.estimates
    assert words[3] == "sugar-ext-lite" and "--data" in words
    run_chain()
    assert len(player.estimates) == 1


@pytest.mark.parametrize(
    ("options", "minutes"), [({}, 10 + 10), ({"skip_refine": True}, 10), ({"until_stage": "mesh"}, 10)]
)
def test_it_is_the_time_of_both_trainings(run_chain: RunChain, options: dict[str, Any], minutes: int) -> None:
    assert f"about {minutes} minutes" in run_chain(**options)


@pytest.mark.parametrize("fails", [True, False])
def test_a_chain_runs_even_if_estimating_fails_or_takes_too_long(run_chain: RunChain, player: Any, fails: bool) -> None:
    if fails:
        player.failures["Estimate of the time"] = CommandError("It failed.")
    else:
        player.timing = {}
    assert "estimate.log" in run_chain()
    assert len(commands(player, "ns-train")) == 2


def test_with_a_gpu_nothing_is_reduced_or_estimated(run_chain: RunChain, player: Any) -> None:
    player.device_type = "cuda"
    run_chain()
    coarse, refine = commands(player, "ns-train")
    assert coarse.startswith("ns-train sugar-ext ") and "--refinement-time" not in refine
    assert "--vertices 200000" in commands(player, "f3rm-ext")[0] and not player.estimates


def test_what_a_later_stage_lacks_is_told_before_the_first(
    run_chain: RunChain, player: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from f3rm_ext.workflow import chain

    player.shortages = ["LPIPS is left out."]
    assert "LPIPS is left out." in run_chain(until_stage="coarse")

    def refuse(*_: object, **__: object) -> list[str]:
        raise ConfigError("Open3D cannot be imported.")

    monkeypatch.setattr(chain, "check_requirements", refuse)
    run_chain(until_stage="coarse")  # nothing is left to do
    with pytest.raises(ConfigError, match="Open3D"):
        run_chain()
    assert not player.ran


@pytest.mark.parametrize(
    ("meta", "folders", "expected"),
    [
        ({"w": 320, "h": 240, "frames": []}, [], 1.0),
        ({"w": 540, "h": 960, "frames": []}, [], 0.42),
        ({"frames": [{"file_path": "a.png", "w": 100, "h": 4000}]}, [], 0.1),
        ({"w": 4000, "h": 3000, "frames": []}, ["images_2", "images_4"], 0.4),
        ({"w": 4000, "h": 3000, "frames": []}, ["images_2"], 0.2),
        ({"frames": []}, [], 1.0),
    ],
)
def test_captures_are_reduced_to_about_400_px(
    tmp_path: Path, meta: dict[str, Any], folders: list[str], expected: float
) -> None:
    (tmp_path / "transforms.json").write_text(json.dumps(meta))
    for name in folders:
        (tmp_path / name).mkdir()
    assert choose_scale(longest_side_px(tmp_path)) == pytest.approx(expected)
