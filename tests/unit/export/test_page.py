"""What a page of splats holds: scores in steps, places, and refusals."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from f3rm_ext.capture.frame import CaptureFrame
from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.errors import ConfigError, SplatFileError
from f3rm_ext.export.notes import Note, read_notes
from f3rm_ext.export.page import MAX_QUESTIONS, PageContent, page_size, write_page
from f3rm_ext.export.questions import SCORE_LEVELS, Question, find_places
from f3rm_ext.splat.gaussians import Gaussians


def clusters(*places: tuple[float, float, float], count: int = 60) -> Gaussians:
    """Gaussians around places, the first one with the largest."""
    generator = torch.Generator().manual_seed(0)
    means = torch.cat([torch.tensor(at) + 0.05 * torch.randn(count, 3, generator=generator) for at in places])
    scales = torch.full((len(means), 3), -4.0)
    scales[:count] += 1.0
    quats = torch.tensor([1.0, 0, 0, 0]).expand(len(means), 4)
    return Gaussians(
        means, scales, quats, torch.ones(len(means), 1), torch.zeros(len(means), 3), torch.zeros(len(means), 0, 3)
    )


@pytest.fixture
def cameras() -> PinholeCameras:
    """One looks along +z from below, one along -z from above."""
    ahead = torch.eye(4)
    ahead[2, 3] = 4.0
    back = torch.diag(torch.tensor([1.0, -1, -1, 1]))
    back[2, 3] = 8.0
    K = torch.tensor([[50.0, 0, 32], [0, 50, 24], [0, 0, 1]])
    return PinholeCameras(torch.stack([ahead, back]), K.expand(2, 3, 3), torch.tensor([64, 64]), torch.tensor([48, 48]))


@pytest.fixture
def content(cameras: PinholeCameras) -> PageContent:
    gaussians = clusters((0.0, 0.0, 0.0))
    return PageContent(
        title="Room",
        gaussians=gaussians,
        cameras=cameras,
        names=["a", "b"],
        poster=np.zeros((4, 4, 3), np.uint8),
        blur_px2=0.3,
        antialiased=False,
    )


@pytest.mark.parametrize("threshold", [-0.2, 0.111, 0.5, 0.97])
def test_steps_of_cosines_stay_on_their_side_of_the_threshold(threshold: float) -> None:
    scores = np.random.default_rng(0).uniform(-0.5, 1, 5000).astype(np.float32)
    question = Question("mug", scores, threshold)
    low, high = question.range
    shown = low + question.to_bytes() / 255 * (high - low)
    np.testing.assert_array_equal(shown >= threshold - 1e-6, scores >= threshold)
    assert np.abs(shown - scores).max() < 1.01 / SCORE_LEVELS * (high - low)


def test_relevancies_are_stored_as_logits() -> None:
    scores = np.array([1e-5, 0.3, 0.5, 0.7, 0.999, 1.0], np.float32)
    question = Question("mug", scores, 0.5, is_relevancy=True)
    low, high = question.range
    shown = 1 / (1 + np.exp(-(low + question.to_bytes() / 255 * (high - low))))
    assert (low, high) == (-8, 8)
    np.testing.assert_allclose(shown, scores, atol=0.03)
    assert (question.to_bytes() >= 255 * (0 - low) / (high - low)).tolist() == (scores >= 0.5).tolist()


@pytest.mark.parametrize("is_relevancy", [True, False])
def test_gaussians_without_features_match_nothing_and_cost_no_steps(is_relevancy: bool) -> None:
    scores = np.array([0.4, 0.5, 0.6], np.float32)
    known = Question("mug", scores, 0.5, is_relevancy)
    without = Question("mug", np.append(scores, np.float32(0.0 if is_relevancy else -1.0)), 0.5, is_relevancy)
    assert without.range == known.range and without.to_bytes().tolist() == [*known.to_bytes().tolist(), 0]
    assert without.matches().tolist() == [False, True, True, False]


def test_places_are_clusters_of_matches_the_largest_first(cameras: PinholeCameras) -> None:
    gaussians = clusters((1.0, 0.0, 0.0), (-1.0, 0.0, 0.0), (0.0, 3.0, 0.0))
    matches = np.arange(len(gaussians)) < 120
    first, second = find_places(gaussians, matches, cameras, scale=0.5)
    np.testing.assert_allclose([first.at, second.at], [[1, 0, 0], [-1, 0, 0]], atol=0.03)
    assert 0.05 < first.size < 0.2 and first.camera == 0, "the nearer camera"
    assert f"{4 * first.size:.2g} wide" in first.label, "units of the capture"
    assert re.match(r"\d+0 wide", find_places(gaussians, matches, cameras, scale=1e-3)[0].label), "such as millimetres"
    assert not find_places(gaussians, np.zeros(len(gaussians), bool), cameras, scale=1.0)


def content_of(page: Path) -> dict[str, Any]:
    """What the page's script reads."""
    found = re.search(r'id="content">(.*?)</script>', page.read_text())
    assert found
    return json.loads(found[1])


def test_notes_are_pinned_and_can_be_read_back(tmp_path: Path, content: PageContent) -> None:
    frame = CaptureFrame(np.array([[0.0, -1, 0], [1, 0, 0], [0, 0, 1]]), np.array([1.0, 2, 3]), 0.5)
    question = Question("mug", np.linspace(0, 1, len(content.gaussians), dtype=np.float32), 0.5)
    file = tmp_path / "notes.json"
    notes = '[{"text": " <b>here</b> ", "position": [3, 4, 5.5]}, {"text": "the mug", "query": "mug"}]'
    file.write_text(notes, encoding="utf-8-sig")  # with a mark of its encoding, as programs of Windows write
    write_page(tmp_path / "a.html", replace(content, frame=frame, questions=[question], notes=read_notes(file)))
    shown = content_of(tmp_path / "a.html")
    here, mug = shown["notes"]
    assert here["text"] == "<b>here</b>" and "<b>here" not in (tmp_path / "a.html").read_text()
    x, y, z = frame.to_scene(np.array([3, 4, 5.5]))
    np.testing.assert_allclose(here["at"], [x, -y, -z])
    assert mug["at"] == shown["questions"][0]["places"][0]["at"] and 0 <= mug["camera"] < 2
    capture = np.array(shown["capture"])
    np.testing.assert_allclose(capture[:, :3] @ here["at"] + capture[:, 3], [3, 4, 5.5])


def look(positions: np.ndarray, directions: np.ndarray) -> PinholeCameras:
    """Cameras with these positions and directions of view; no direction is along x."""
    views = torch.eye(4).repeat(len(positions), 1, 1)
    forward = torch.nn.functional.normalize(torch.from_numpy(directions).float(), dim=1)
    right = torch.nn.functional.normalize(torch.linalg.cross(forward, torch.tensor([[1.0, 0, 0]])), dim=1)
    views[:, :3, :3] = torch.stack([right, torch.linalg.cross(forward, right), forward], dim=1)
    views[:, :3, 3:] = -views[:, :3, :3] @ torch.from_numpy(positions).float()[..., None]
    sides = torch.full((len(views),), 64)
    return PinholeCameras(views, torch.diag(torch.tensor([50.0, 50, 1])).expand(len(views), 3, 3), sides, sides)


@pytest.mark.parametrize("kind", ["slider", "drone", "panorama", "object"])
def test_views_turn_about_what_is_looked_at(tmp_path: Path, content: PageContent, kind: str) -> None:
    places, random = np.linspace(-0.5, 0.5, 8), np.random.default_rng(0)
    zero, one, angles = 0 * places, 0 * places + 1, np.linspace(0, 6, 8)
    ring = np.stack([zero, np.cos(angles), np.sin(angles)], axis=1)
    positions, directions, depth = {
        "slider": (np.stack([places, zero, -3 * one], axis=1), np.stack([zero, zero, one], axis=1), 3.0),
        "drone": (
            np.stack([places, zero, 2 * one], axis=1),
            np.stack([0.01 * random.normal(size=8), 0.01 * random.normal(size=8), -one], axis=1),
            2.0,
        ),
        "panorama": (0.05 * ring, ring, 4.0),
        "object": (3 * ring, -ring, 3.0),
    }[kind]
    around = clusters(*map(tuple, 4 * ring)) if kind == "panorama" else content.gaussians
    if kind == "object":  # in front of a background, where most Gaussians are
        around = clusters((0.0, 0.0, 0.0), (0.0, 9.0, 9.0), (0.0, -9.0, 9.0), (0.0, 9.0, -9.0), (0.0, -9.0, -9.0))
    cameras = look(positions, directions)
    shown = replace(content, gaussians=around, cameras=cameras, names=[str(i) for i in range(8)])
    write_page(tmp_path / "a.html", shown)
    page = content_of(tmp_path / "a.html")
    reach = [camera["reach"] for camera in page["cameras"]]
    if kind == "panorama":  # Gaussians at either side are less deep
        assert 1 < page["radius"] < 4 and min(reach) > 1
    else:
        np.testing.assert_allclose([page["radius"], *reach], depth, rtol=0.1)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "{}",
        "[1]",
        "[" * 9999,
        '[{"text": "", "position": [1, 2, 3]}]',
        '[{"text": "a"}]',
        '[{"text": "a", "position": [1, 2]}]',
        '[{"text": "a", "position": [1, 2, NaN]}]',
        '[{"text": "a", "position": [1, 2, 1e999]}]',
        '[{"text": "a", "position": [1, 2, 3], "query": "b"}]',
        f'[{{"text": "a", "position": [1, 2, 1{"0" * 400}]}}]',
    ],
)
def test_notes_of_another_form_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "notes.json").write_text(text)
    with pytest.raises(ConfigError, match=r"notes\.json .*position"):
        read_notes(tmp_path / "notes.json")


def test_a_note_at_a_question_that_finds_nothing(tmp_path: Path, content: PageContent) -> None:
    found = [
        Question(name, np.full(len(content.gaussians), score, np.float32), 0.5) for name, score in (("a", 1), ("b", 0))
    ]
    for query in ("b", "c"):
        with pytest.raises(ConfigError, match=f"'{query}'.* \\(a\\)"):
            write_page(tmp_path / "x.html", replace(content, questions=found, notes=[Note("x", None, query)]))


def test_no_page_is_larger_than_it_was_measured(tmp_path: Path, content: PageContent) -> None:
    far = clusters(*((3.3 * i, 0.1, 0.7) for i in range(7)))
    found = Question("mug", np.ones(len(far), np.float32), 0.5)
    notes = [Note("wash before use " * 9, (i / 3, 0.2, 0.3)) for i in range(50)] + [Note("here", None, "mug")]
    content = replace(content, gaussians=far, questions=[found], notes=notes)
    size = page_size(content, "room")
    write_page(tmp_path / "room.html", content)
    assert len(content_of(tmp_path / "room.html")["questions"][0]["places"]) == 5
    assert 0 <= size - (tmp_path / "room.html").stat().st_size < 1000
    content.gaussians.opacities[10:] = -9.0
    assert page_size(content, "room") < size, "what is never drawn does not count"
    content.gaussians.opacities[:] = -9.0
    assert page_size(content, "room") >= len(content.gaussians)
    assert write_page(tmp_path / "room.html", content).count == len(content.gaussians)


def test_weights_of_scores_are_the_lengths_of_features(content: PageContent) -> None:
    lengths = np.linspace(0, 0.5, len(content.gaussians), dtype=np.float32)
    question = Question("mug", np.zeros(len(lengths), np.float32), 0.5)
    stored = replace(content, questions=[question], lengths=lengths).take(torch.arange(9, 60), 0).to_score_bytes()
    scores, weights = np.frombuffer(stored, np.uint8).reshape(2, -1)
    np.testing.assert_allclose(weights / 255, lengths[9:] / 0.5, atol=0.003)
    assert (scores == scores[0]).all() and content.to_score_bytes() == b""


def test_a_page_names_what_it_holds_and_leaves_out_what_is_never_drawn(tmp_path: Path, content: PageContent) -> None:
    content.gaussians.opacities[:10] = -9.0
    made = write_page(tmp_path / "room.html", replace(content, title="<Room> & more"))
    page = (tmp_path / "room.html").read_text()
    assert made.count == len(content.gaussians) - 10 and made.sh_degree == 0
    assert "<Room>" not in page and "&lt;Room&gt; &amp; more" in page and "default-src 'none'" in page
    assert page.rstrip().endswith("<!-- made_by: f3rm-ext export page -->")


@pytest.mark.parametrize(("value", "kept"), [(1, 1), (3, 2)])
def test_the_degree_can_be_lowered(tmp_path: Path, content: PageContent, value: int, kept: int) -> None:
    gaussians = content.gaussians.to_sh_degree(2)
    content = replace(content, gaussians=gaussians).take(torch.arange(len(gaussians)), value)
    assert write_page(tmp_path / "room.html", content).sh_degree == kept


def test_what_no_page_can_hold(tmp_path: Path, content: PageContent) -> None:
    many = [Question(str(i), np.zeros(len(content.gaussians), np.float32), 0.5) for i in range(MAX_QUESTIONS + 1)]
    with pytest.raises(ConfigError, match=str(MAX_QUESTIONS + 1)):
        write_page(tmp_path / "room.html", replace(content, questions=many))
    content.gaussians.means[3, 1] = torch.nan
    with pytest.raises(SplatFileError, match="NaN"):
        write_page(tmp_path / "room.html", content)
    assert not list(tmp_path.iterdir())
