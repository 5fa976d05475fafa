"""Which of several solutions is taken, on made-up scenes of which the mappers lose photos."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from f3rm_ext.sfm import solution
from f3rm_ext.sfm.mapping import distortion_folds, image_names
from f3rm_ext.sfm.solution import AT_ONCE, Solution, Solver, judge, remove_weak_photos
from f3rm_ext.sfm.verdict import Evidence

pycolmap = pytest.importorskip("pycolmap")
MakeUp = Callable[..., Any]


def keep_points(model: Any, number: int, count: int) -> None:
    """Removes what a photo sees but for some points."""
    rows = [row for row, feature in enumerate(model.image(number).points2D) if feature.has_point3D()]
    for row in rows[count:]:
        model.delete_observation(number, row)


def test_photos_that_hang_on_few_points_lose_their_pose(make_scene: MakeUp) -> None:
    scene = make_scene()
    model = pycolmap.Reconstruction(scene.truth)
    first, second, *rest = sorted(model.reg_image_ids())
    keep_points(model, first, 19)
    keep_points(model, second, 20)
    assert remove_weak_photos(model, scene.database) == []
    assert sorted(model.reg_image_ids()) == [second, *rest]
    assert scene.centre_error(model) < 1e-2


def test_points_that_only_weak_photos_see_do_not_count(make_scene: MakeUp) -> None:
    """Three photos share points with each other alone: once one is removed, the other two have none."""
    scene = make_scene()
    model = pycolmap.Reconstruction(scene.truth)
    numbers = sorted(model.reg_image_ids())
    ends = dict(zip(numbers[:3], (19, 25, 25), strict=True))
    for place, point in enumerate(sorted(model.points3D)):
        elements = model.point3D(point).track.elements
        for number, row in [(element.image_id, element.point2D_idx) for element in elements]:
            end = ends.get(number)
            if place < 25 if end is None else place >= end:
                model.delete_observation(number, row)
    remove_weak_photos(model, scene.database)
    assert sorted(model.reg_image_ids()) == numbers[3:]


@pytest.mark.parametrize(("num_points", "stay"), [(19, 0), (20, 3)])
def test_three_photos_stay_if_they_share_enough_points(make_scene: MakeUp, num_points: int, stay: int) -> None:
    scene = make_scene(num_frames_per_rig=3, num_points3D=num_points)
    model = pycolmap.Reconstruction(scene.truth)
    assert remove_weak_photos(model, scene.database) == []
    assert model.num_reg_images() == stay


def turn_on_the_spot(model: Any, number: int) -> None:
    """Turns a photo by 20 degrees about its own centre."""
    image = model.image(number)
    away = pycolmap.Rigid3d(pycolmap.Rotation3d(np.deg2rad([0, 20.0, 0])), np.zeros(3))
    model.frame(image.frame_id).set_cam_from_world(image.camera_id, away * image.cam_from_world())


def test_a_contradicted_photo_is_removed_unless_it_has_many_of_the_matches(make_scene: MakeUp) -> None:
    """One of eight photos has a quarter of all matches; once those with six photos are forgotten, few."""
    scene = make_scene()
    first, *rest = sorted(scene.truth.reg_image_ids())
    model = pycolmap.Reconstruction(scene.truth)
    turn_on_the_spot(model, first)
    everyone = sorted(image_names(model))
    assert remove_weak_photos(model, scene.database) == everyone, "each has one pair of seven that does not fit"
    assert model.num_reg_images() == 8
    with scene.database.open() as opened:
        for other in rest[:6]:
            opened.delete_two_view_geometry(first, other)
    assert remove_weak_photos(model, scene.database) == []
    assert sorted(model.reg_image_ids()) == rest and scene.centre_error(model) < 1e-3


@pytest.mark.parametrize(
    ("ours", "theirs", "beats"),
    [
        ((5, "", 1.0), (4, "", 1.0), True),
        ((5, "", 1.0), (5, "", 0.9), False),
        ((4, "", 1.0), (9, "doubt", 0.9), True),
        ((9, "doubt", 0.9), (4, "", 1.0), False),
        ((9, "doubt", 0.9), (5, "doubt", 0.9), True),
        ((9, "doubt", 0.4), (5, "doubt", 0.9), False),
    ],
)
def test_trusted_poses_of_more_photos_win(ours: Any, theirs: Any, beats: bool) -> None:
    def make(photos: int, doubt: str, matches_fit: float) -> Solution:
        evidence = Evidence(1, 1.0, matches_fit, 0.0, 0.0, 100.0, matches=100 * photos)
        return Solution(None, [set(map(str, range(photos)))], "global", evidence, doubt, [])

    assert make(*ours).beats(make(*theirs)) == beats


class TestSolver:
    """A mapper that adds one camera after the other and stops early."""

    @pytest.fixture
    def scene(self, make_scene: MakeUp, request: pytest.FixtureRequest) -> Any:
        return make_scene(**getattr(request, "param", {}))

    @pytest.fixture
    def find(self, scene: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
        """Finds a solution where the mappers register so many photos, by default all, and change what they found."""
        solve = solution.solve

        def run(mapper: Any, one_by_one: int = 8, at_once: int = 8, change: Callable[..., None] = lambda *_: None):
            calls, said = [], []

            def lose_photos(database: Any, folder: Path, name: Any, *args: Any, **options: Any) -> list[Any]:
                calls.append(name)
                count = {"incremental": one_by_one, "global": at_once}[name]
                models = solve(database, folder, name, *args, **options) if count else []
                for model in models:
                    for frame in list(model.reg_frame_ids())[count:]:
                        model.deregister_frame(frame)
                    change(model, name, **options)
                return models

            monkeypatch.setattr(solution, "solve", lose_photos)
            monkeypatch.setattr(solution, "register_missing", lambda model, _, missing, *__: missing)
            stages: list[tuple[str, int, int]] = []
            solver = Solver(scene.database, tmp_path / "work", True, lambda *step: stages.append(step), said.append)
            best = solver.find(mapper)
            attempts = calls.count("global")
            steps = [(number, 3) for number in [*range(attempts), *[3] * bool(attempts)]]
            assert [step[1:] for step in stages if step[0] == AT_ONCE] == steps
            return best, calls, said

        return run

    def test_a_complete_solution_is_taken(self, find: Callable[..., Any]) -> None:
        best, calls, said = find("auto")
        assert calls == ["incremental"] and len(best.groups[0]) == 8 and not said

    def test_all_cameras_at_once_where_photos_are_left_out(self, scene: Any, find: Callable[..., Any]) -> None:
        best, calls, said = find("auto", one_by_one=3)
        assert calls == ["incremental", "global"] and best.mapper == "global"
        assert len(best.groups[0]) == 8 and not best.doubt and scene.centre_error(best.model) < 1e-3
        assert "8" in said[0] and "3" in said[0]

    def test_the_first_solution_stays_where_the_other_has_no_more_photos(self, find: Callable[..., Any]) -> None:
        best, calls, said = find("auto", one_by_one=5, at_once=5)
        assert calls == ["incremental", "global", "global", "global"] and best.mapper == "incremental"
        assert len(said) == 1 and "second pass" in said[0]

    def test_trusted_poses_are_better_than_none_and_doubtful_ones_are_not(self, find: Callable[..., Any]) -> None:
        best, _, said = find("auto", one_by_one=0)
        assert best.mapper == "global" and not best.doubt and "none" in said[0]

        def mix(model: Any, *_: str) -> None:
            for number in list(model.reg_image_ids())[::2]:
                turn_on_the_spot(model, number)

        assert find("auto", one_by_one=0, change=mix)[0] is None
        assert find("global", change=mix)[0].doubt
        assert find("auto", one_by_one=0, at_once=0)[0] is None

    def test_a_lens_that_folds_is_not_taken(self, find: Callable[..., Any]) -> None:
        def bend(model: Any, mapper: str, **_: bool) -> None:
            for camera in model.cameras.values():
                camera.params = [*camera.params[:3], -5.0 if mapper == "global" else camera.params[3]]
                assert distortion_folds(camera) == (mapper == "global")

        best, _, _ = find("auto", one_by_one=5, change=bend)
        assert best.mapper == "incremental" and len(best.groups[0]) == 5

    def test_distortion_that_folds_is_left_out(self, find: Callable[..., Any]) -> None:
        refined: list[bool] = []

        def bend(model: Any, _: str, refine_distortion: bool = True) -> None:
            refined.append(refine_distortion)
            for camera in model.cameras.values():
                camera.params = [*camera.params[:3], -5.0 if refine_distortion else 0.0]

        best, calls, said = find("auto", change=bend)
        assert calls == ["incremental"] * 2 and refined == [True, False] and "distortion" in said[0]
        assert len(best.groups[0]) == 8 and not best.doubt

    def test_photos_of_the_second_pass_that_are_removed_are_not_named(self, find: Callable[..., Any]) -> None:
        best, _, said = find("global", at_once=5)
        assert best.registered_again == [] and not said, "the second pass of this test registers nothing"

    @pytest.mark.parametrize("scene", [{"num_frames_per_rig": 12}], indirect=True)
    @pytest.mark.parametrize(("wrong", "stay"), [(1, 11), (2, 12)])
    def test_few_photos_in_the_wrong_place_are_left_out(self, find: Callable[..., Any], wrong: int, stay: int) -> None:
        def move(model: Any, *_: str, **__: bool) -> None:
            for number in sorted(model.reg_image_ids())[:wrong]:
                turn_on_the_spot(model, number)

        best, _, said = find("incremental", one_by_one=12, change=move)
        assert len(best.groups[0]) == stay and bool(best.doubt) == (stay == 12)
        assert any("Left out" in line for line in said) == (stay == 11)

    def test_a_mapper_that_is_named_is_the_only_one(self, find: Callable[..., Any]) -> None:
        best, calls, _ = find("incremental", one_by_one=4)
        assert calls == ["incremental"] and len(best.groups[0]) == 4
        best, calls, _ = find("global", at_once=4)
        assert calls == ["global"] * 3 and len(best.groups[0]) == 4
        assert find("global", at_once=1)[0] is None


def test_other_focal_lengths_are_tried_until_one_is_enough(
    make_scene: MakeUp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, begins = make_scene(), []

    def solve(database: Any, *_: Any) -> list[Any]:
        with database.open() as opened:
            begins.append(opened.read_all_cameras()[0].mean_focal_length() / 1280)
        return [pycolmap.Reconstruction(scene.truth)] if begins[-1] == 1.8 else []

    monkeypatch.setattr(solution, "solve", solve)
    best = Solver(scene.database, tmp_path / "work", True, lambda *_: None, lambda _: None).find("global")
    assert begins == [1.0, 1.8] and best is not None and len(best.groups[0]) == 8
    assert scene.database.ids() and not list(tmp_path.glob("work*")), "the copies are gone"


def test_wrong_poses_are_doubted(make_scene: MakeUp) -> None:
    scene = make_scene()
    right = judge([scene.truth], "global", scene.database, [])
    assert not right.doubt and right.evidence.matches > 1000 and right.groups == [image_names(scene.truth)]
    smaller = pycolmap.Reconstruction(scene.truth)
    smaller.deregister_frame(next(iter(smaller.reg_frame_ids())))
    assert judge([smaller, scene.truth], "global", scene.database, []).groups[1] == (
        image_names(scene.truth) - image_names(smaller)
    )
