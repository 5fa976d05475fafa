"""Still pictures in passes: which rays are rendered when, and that nothing differs from a picture made at once."""

import pytest
import torch
from nerfstudio.cameras.cameras import Cameras, CameraType
from nerfstudio.cameras.rays import RayBundle
from torch import Tensor

from f3rm_ext.viewer.passes import PicturePasses, picture_passes


def camera_of(height: int, width: int, kind: CameraType = CameraType.PERSPECTIVE) -> Cameras:
    pose = torch.tensor([[[1.0, 0, 0, 0], [0, 0, 1, 0], [0, -1, 0, 0]]])
    metadata = {"cam_idx": 3}
    return Cameras(pose, 30.0, 30.0, width / 2, height / 2, width, height, camera_type=kind, metadata=metadata)


def rays_of(camera: Cameras) -> RayBundle:
    return camera.generate_rays(camera_indices=0, keep_shape=True)


@pytest.mark.parametrize("kind", [CameraType.PERSPECTIVE, CameraType.EQUIRECTANGULAR])
@pytest.mark.parametrize("divisors", [(8, 4, 2, 1), (8, 1), (4, 2, 1), (8, 2)])
def test_a_pass_renders_what_the_last_one_did_not(divisors: tuple[int, ...], kind: CameraType) -> None:
    whole = camera_of(37, 50, kind)
    expected, picture = rays_of(whole).directions, PicturePasses()
    known = 0

    for divisor in divisors:
        counts: list[int] = []

        def render(rays: RayBundle, counts: list[int] = counts) -> dict[str, Tensor]:
            counts.append(rays.directions[..., 0].numel())
            return {"rgb": rays.directions}

        camera = picture.camera(whole, divisor).to("cpu")
        assert camera.metadata is not None and camera.metadata["cam_idx"] == 3 and picture_passes(camera) is picture
        rays = rays_of(camera)
        shown = picture.render(rays, render)["rgb"]
        assert shown.shape == rays.directions.shape and abs(len(shown) - 37 / divisor) < 1
        rows, columns = (torch.arange(size) * divisor + 5 % divisor for size in shown.shape[:2])
        torch.testing.assert_close(shown, expected[rows][:, columns], atol=1e-5, rtol=0)
        assert counts == [rays.size - known], "each ray once"
        known = rays.size
    assert picture_passes(whole) is None


def test_pixels_stand_for_what_is_around_them() -> None:
    """A pass does not shift the picture by more than a quarter of its own pixels."""
    whole = camera_of(64, 64)
    for divisor in (8, 4, 2):
        camera = PicturePasses().camera(whole, divisor)
        shift_px = float(camera.cx - camera.width / 2)  # of the optical axis, pixels of the pass
        assert abs(shift_px) <= 0.25, divisor


def test_an_output_that_fails_in_a_pass_is_missing_from_then_on() -> None:
    whole, picture = camera_of(16, 16), PicturePasses()
    for divisor, names in ((8, {"a", "b"}), (4, {"a"}), (2, {"a", "b"})):
        rays = rays_of(picture.camera(whole, divisor))
        shown = picture.render(rays, lambda rest, names=names: {name: rest.directions for name in names})
        assert set(shown) == ({"a", "b"} if divisor == 8 else {"a"})


def test_after_a_pass_that_fails_the_one_before_is_kept() -> None:
    whole, picture = camera_of(16, 16), PicturePasses()
    counts: list[int] = []

    def render(rays: RayBundle) -> dict[str, Tensor]:
        counts.append(rays.size)
        if len(counts) == 2:
            raise RuntimeError("no memory")
        return {"rgb": rays.directions}

    for divisor in (4, 2, 1):
        rays = rays_of(picture.camera(whole, divisor))
        if divisor == 2:
            with pytest.raises(RuntimeError):
                picture.render(rays, render)
        else:
            torch.testing.assert_close(picture.render(rays, render)["rgb"], rays.directions, atol=1e-6, rtol=0)
    assert counts == [16, 48, 240]


def test_a_field_renders_in_passes_what_it_renders_at_once(make_model, make_spec) -> None:
    model, whole = make_model((make_spec("dense", 12),), init_density=5.0).eval(), camera_of(19, 26)
    at_once, picture = model.get_outputs_for_camera(whole), PicturePasses()
    for divisor in (8, 2, 1):
        in_passes = model.get_outputs_for_camera(picture.camera(whole, divisor))
    assert set(in_passes) == set(at_once)
    for name, value in at_once.items():
        torch.testing.assert_close(in_passes[name], value, atol=1e-3, rtol=1e-3, msg=name)
