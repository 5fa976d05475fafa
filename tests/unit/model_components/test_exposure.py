"""Exposures of training photos, and the judging of held-out ones."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from f3rm_ext.capture.exposures import MeasuredStops
from f3rm_ext.model_components import masks
from f3rm_ext.model_components.exposure import (
    ExposureModel,
    apply_stops,
    fit_halves,
    judge,
    make_exposures,
    saturate,
)


@pytest.fixture
def picture() -> torch.Tensor:
    return torch.rand(12, 16, 3, generator=torch.Generator().manual_seed(0)) * 0.6 + 0.1


def exposures(*stops: float | None) -> ExposureModel:
    return ExposureModel(stops)


def test_no_stop_changes_nothing_and_one_doubles_light(picture: torch.Tensor) -> None:
    torch.testing.assert_close(apply_stops(picture, torch.zeros(3)), picture)
    grey = torch.full((1, 3), 188 / 255)
    torch.testing.assert_close(apply_stops(grey, torch.ones(3)), torch.ones(1, 3), atol=0.01, rtol=0)
    torch.testing.assert_close(apply_stops(apply_stops(picture, torch.ones(3)), -torch.ones(3)), picture)


def test_each_ray_has_the_gains_of_its_photo(picture: torch.Tensor) -> None:
    model = exposures(-1.0, 1.0)
    rays = picture.reshape(-1, 3)
    index = torch.arange(len(rays)) % 2
    shown = model(rays, index)
    for photo in (0, 1):
        torch.testing.assert_close(shown[index == photo], model(rays[index == photo], photo))
    assert (shown[index == 1] > rays[index == 1]).all() and (shown[index == 0] < rays[index == 0]).all()


def test_the_background_is_not_exposed(picture: torch.Tensor) -> None:
    model = exposures(-1.0, 1.0)
    behind = torch.full_like(picture, 0.3)
    torch.testing.assert_close(model(behind, 1, behind), behind)
    torch.testing.assert_close(model(picture + behind, 1, behind), model(picture, 1) + behind)


def test_gradients_are_those_of_differences() -> None:
    colors = torch.tensor([[0.0, 0.02, 0.5], [0.9, 1.2, 0.06]])
    stops = torch.tensor([0.3, -0.4, 0.1])
    step = 1e-3
    for index, value in enumerate((colors, stops)):
        given = [colors, stops]
        given[index] = value.clone().requires_grad_(True)
        apply_stops(*given).sum().backward()
        above, below = ([*given[:index], value + change, *given[index + 1 :]] for change in (step, -step))
        expected = (apply_stops(*above) - apply_stops(*below)).detach() / (2 * step)
        expected = expected if index == 0 else expected.sum(dim=0)
        torch.testing.assert_close(given[index].grad, expected, atol=2e-3, rtol=5e-3)


def test_a_photo_is_brought_to_the_mean_exposure_where_it_is_not_saturated(picture: torch.Tensor) -> None:
    model = exposures(-1.5, 1.5)
    photo = model(picture, 1).detach().clamp(max=1)
    shown, known = model.undo(photo, 1)
    assert (photo == 1).any() and known.any() and not known[(photo == 1).any(dim=-1)].any()
    torch.testing.assert_close(shown[known[..., 0]], picture[known[..., 0]])


def test_seeds_come_from_exif_and_have_mean_zero() -> None:
    model = exposures(-6.0, None, -3.0)
    torch.testing.assert_close(model.stops.detach(), torch.tensor([-1.5, 0.0, 1.5])[:, None].repeat(1, 3))


def test_the_projection_takes_the_mean_away_and_nothing_else() -> None:
    model = exposures(0.0, 1.0, 4.0)
    before = torch.randn(3, 3, generator=torch.Generator().manual_seed(1))
    model.stops.data.copy_(before + 5)
    model.project()
    assert model.stops.mean(dim=0).abs().max() < 1e-6
    torch.testing.assert_close(model.stops.detach(), before - before.mean(dim=0), atol=1e-5, rtol=0)


def measured(*stops: float, vary: bool = True) -> MeasuredStops:
    return MeasuredStops(np.array(stops, np.float32)[:, None].repeat(3, axis=1), 2.0, vary)


@pytest.mark.parametrize(
    ("option", "stops", "found", "made"),
    [
        ("auto", [-3.0, -2.0], None, True),
        ("auto", [-3.0, None, -2.0], None, True),
        ("auto", [-3.0, -3.1], measured(1.0, -1.0), False),  # EXIF knows better
        ("auto", [None, None], None, False),
        ("auto", [None, None], measured(1.0, -1.0), True),
        ("auto", [None, None], measured(1.0, -1.0, vary=False), False),
        ("auto", None, None, False),
        ("auto", None, "nothing", False),  # such as panoramas, which have no stereo
        ("on", None, None, True),
        ("on", [-3.0, -3.0], None, True),
        ("off", [-3.0, -2.0], measured(1.0, -1.0), False),
    ],
)
def test_auto_goes_by_exif_and_without_by_the_photos(option: Any, stops: Any, found: Any, made: bool) -> None:
    metadata = {"exif_stops": stops}
    if found is not None:
        metadata["measure_stops"] = lambda: None if found == "nothing" else found
    model = make_exposures(option, 2, metadata)
    assert (model is not None) is made
    if model is not None and found is not None:
        torch.testing.assert_close(model.stops.detach(), torch.from_numpy(found.stops))


def test_exposures_that_differ_are_not_called_constant(capsys: pytest.CaptureFixture[str]) -> None:
    """Photos of many days differ by their light more than by their exposure."""
    assert make_exposures("auto", 2, {"measure_stops": lambda: measured(0.7, -0.7)._replace(vary=False)}) is None
    text = " ".join(capsys.readouterr().out.split())
    assert "2.0 stops" in text and "constant" not in text


def test_without_exif_the_photos_are_the_start_unless_it_resumes() -> None:
    model = exposures(None, None)
    model.start(None)
    model.start(lambda: None)
    assert not model.stops.any()
    model.start(lambda: measured(1.0, -1.0))
    torch.testing.assert_close(model.stops.detach()[:, 0], torch.tensor([1.0, -1.0]))
    model.start(lambda: measured(2.0, -2.0))
    assert model.stops.max() == 1
    with_exif = exposures(-3.0, -3.0)
    with_exif.start(lambda: measured(1.0, -1.0))
    assert not with_exif.stops.any()


def test_a_photo_is_exposed_as_exif_says_and_as_strongly_as_training_photos_are() -> None:
    model = exposures(-4.0, -2.0, None)
    assert model.held_out_stops(None) is None and exposures(None).held_out_stops(-3.0) is None
    torch.testing.assert_close(model.held_out_stops(-2.5), torch.full((3,), 0.5))
    model.stops.data.copy_(torch.tensor([[-0.8, -1.0, -1.2], [0.8, 1.0, 1.2], [0.0, 0.0, 0.0]]))
    torch.testing.assert_close(model.held_out_stops(-2.5), torch.tensor([0.4, 0.5, 0.6]))
    torch.testing.assert_close(exposures(-3.0, -3.0).held_out_stops(-2.0), torch.ones(3))


def test_saturated_pixels_ask_for_no_more_than_white() -> None:
    rgb, photo = torch.full((2, 3), 1.5), torch.tensor([[1.0] * 3, [0.5] * 3])
    assert saturate(rgb, photo).tolist() == [[1.0] * 3, [1.5] * 3]


def test_pixels_are_judged_by_fits_that_have_not_seen_them(picture: torch.Tensor) -> None:
    photo = apply_stops(picture, torch.tensor([0.2, -0.5, -1.0]))
    torch.testing.assert_close(fit_halves(picture, photo), photo, atol=1e-4, rtol=0)
    other = photo.clone()
    other[:, :8] *= 0.5
    one, two = fit_halves(picture, photo), fit_halves(picture, other)
    torch.testing.assert_close(one[:, :8], two[:, :8])
    assert not torch.allclose(one[:, 8:], two[:, 8:], atol=0.05)


def test_pixels_that_masks_leave_out_fit_nothing(picture: torch.Tensor) -> None:
    photo = apply_stops(picture, torch.tensor([0.2, -0.5, -1.0]))
    mask = torch.ones(12, 16, 1, dtype=torch.bool)
    mask[:6] = False
    shown = fit_halves(picture, torch.where(mask, photo, 0.9), mask)
    torch.testing.assert_close(shown[6:], photo[6:], atol=1e-4, rtol=0)
    assert fit_halves(picture, photo, torch.zeros_like(mask)).isfinite().all()


@pytest.mark.parametrize("stops", [-2.0, None])
def test_judging_reports_how(picture: torch.Tensor, stops: float | None) -> None:
    photo = apply_stops(picture, torch.full((3,), -1.0))
    outputs = {"rgb": picture, "depth": picture[..., :1]}
    batch = {} if stops is None else {"exif_stops": stops}
    unchanged, none = judge(None, outputs, photo, batch)
    assert unchanged["rgb"] is picture and not none
    shown, metrics = judge(exposures(-2.0, 0.0), outputs, photo, batch)
    assert metrics["exposure_from_exif"] == (stops is not None)
    assert metrics["psnr_at_mean_exposure"] == pytest.approx(float(masks.psnr(picture, photo)))
    assert float(masks.psnr(shown["rgb"], photo)) > 60 and shown["depth"] is outputs["depth"]


def test_a_photo_that_is_masked_out_has_no_psnr(picture: torch.Tensor) -> None:
    mask = torch.zeros(12, 16, 1, dtype=torch.bool)
    _, metrics = judge(exposures(-1.0, 0.0), {"rgb": picture}, picture, {"mask": mask})
    assert set(metrics) == {"exposure_from_exif"} and not any(math.isnan(value) for value in metrics.values())
