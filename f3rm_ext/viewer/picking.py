"""Picking from the scene: the feature under a click, and the colours that fit a view.

Both render, so the caller must hold nerfstudio's training lock. Neither needs the weights of an extractor.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.data.scene_box import OrientedBox
from torch.nn import functional

from f3rm_ext.errors import ConfigError
from f3rm_ext.features.display import fit_display
from f3rm_ext.features.space import ExtraOutput
from f3rm_ext.features.spec import DisplayBasis
from f3rm_ext.query.embeddings import Embeddings
from f3rm_ext.query.exemplar import Example, take_example
from f3rm_ext.query.options import Region
from f3rm_ext.query.queryable import HasGroups, Queryable, QueryHead, render_map

SOLID = 0.5
"""Opacity from which on a ray counts as hitting something."""
FIT_RAYS = 4096
"""Approximate number of rays that colours are fitted to."""
_FEW_RAYS = 16
_AROUND_PX = 120
"""Width and height of the picture that shows what there is around a click."""
_FOCAL_PX = 1000.0
"""Focal length of a camera of one pixel, so that it sees little more than the ray through its centre."""


@dataclass(frozen=True)
class Ray:
    """The ray of a click, in the scene frame."""

    origin: tuple[float, float, float]
    direction: tuple[float, float, float]
    """Any length above 0."""

    @classmethod
    def from_click(cls, origin: Sequence[float | int], direction: Sequence[float | int]) -> "Ray":
        """Converts a click as a page sends it, with whole numbers as integers."""
        (x, y, z), (u, v, w) = map(float, origin), map(float, direction)
        return cls((x, y, z), (u, v, w))


@dataclass(frozen=True)
class Viewpoint:
    """The camera and crop of a page of the viewer."""

    camera: Cameras
    obb_box: OrientedBox | None = None


@contextmanager
def not_training(model: Queryable) -> Iterator[None]:
    """Puts the model into evaluation mode for the duration of a ``with`` block."""
    before = model.training
    model.train(False)
    try:
        yield
    finally:
        model.train(before)


def camera_along(ray: Ray, side_px: int = 1, focal_px: float = _FOCAL_PX) -> Cameras:
    """Returns a camera, by default of one pixel, that looks along the ray."""
    back = -functional.normalize(torch.tensor(ray.direction, dtype=torch.float32), dim=0)
    axis = torch.eye(3)[int(back.abs().argmin())]
    right = functional.normalize(torch.linalg.cross(axis, back), dim=0)
    up = torch.linalg.cross(back, right)
    pose = torch.stack([right, up, back, torch.tensor(ray.origin, dtype=torch.float32)], dim=1)
    return Cameras(pose[None], fx=focal_px, fy=focal_px, cx=side_px / 2, cy=side_px / 2, width=side_px, height=side_px)


def pick_feature(
    model: Queryable, head: QueryHead, ray: Ray, name: str, obb_box: OrientedBox | None = None
) -> tuple[Embeddings, tuple[float, float, float]]:
    """Renders the feature along a ray, and tells the point of the scene frame that the ray hits.

    Raises:
        ConfigError: the ray hits nothing.
    """
    space = head.space()
    extra: dict[str, ExtraOutput] = {"clicked": lambda _, rendered_of: space.coordinates(rendered_of(head.name))}
    with not_training(model), torch.inference_mode():
        outputs = model.render_camera(camera_along(ray), extra, obb_box)
    if float(outputs["accumulation"].reshape(-1)[0]) < SOLID:
        raise ConfigError("There is nothing where you clicked: click on something solid.")
    values = space.lift(outputs["clicked"].reshape(1, -1)).clone()
    depth = float(outputs["depth"].reshape(-1)[0])
    direction = functional.normalize(torch.tensor(ray.direction), dim=0)
    x, y, z = (torch.tensor(ray.origin) + depth * direction).tolist()
    return Embeddings.from_codes(values, (name,), space.left_out(values)), (x, y, z)


def pick_thing(model: Queryable, head: QueryHead, ray: Ray, name: str, obb_box: OrientedBox | None = None) -> Example:
    """Finds the thing that a ray hits, and what there is around it; see :func:`~f3rm_ext.query.exemplar.take_example`.

    It is looked for in a picture of 120 pixels a side, 53° wide, in the middle of which the ray lies.
    """
    with not_training(model):
        around = render_map(model, head, camera_along(ray, _AROUND_PX, float(_AROUND_PX)), obb_box)
    return take_example(around, Region(name, _AROUND_PX / 2, _AROUND_PX / 2))


def pick_group(model: Queryable, name: str, ray: Ray, obb_box: OrientedBox | None = None) -> int:
    """Returns the number of the group that a ray hits, by the feature of this name.

    Raises:
        ConfigError: the ray hits none.
    """
    assert isinstance(model, HasGroups)
    with not_training(model):
        number = int(model.group_map(camera_along(ray), name, obb_box)[0, 0])
    if number < 0:
        raise ConfigError("There is no group where you clicked: click on something solid.")
    return number


def fit_displays(model: Queryable, viewpoint: Viewpoint) -> dict[str, DisplayBasis]:
    """Fits projections to colours, by head, that show best the differences within a view.

    Raises:
        ConfigError: the model has no features, or the view is almost empty.
    """
    heads = model.query_heads()
    if not heads:
        raise ConfigError("The model has no features to fit colours to: train with some.")
    camera = copy.deepcopy(viewpoint.camera)
    pixels = int(camera.height.item()) * int(camera.width.item())
    if pixels > FIT_RAYS:
        camera.rescale_output_resolution((FIT_RAYS / pixels) ** 0.5)
    spaces = {name: head.space() for name, head in heads.items()}
    extra: dict[str, ExtraOutput] = {
        f"seen {name}": lambda _, rendered_of, name=name: spaces[name].coordinates(rendered_of(name)) for name in heads
    }
    with not_training(model), torch.inference_mode():
        outputs = model.render_camera(camera, extra, viewpoint.obb_box)
    solid = outputs["accumulation"].reshape(-1) >= SOLID
    if int(solid.sum()) < _FEW_RAYS:
        raise ConfigError("This view is almost empty, so colours cannot be fitted to it: look at the scene.")
    displays = {}
    for name, space in spaces.items():
        seen = outputs[f"seen {name}"].flatten(0, 1)[solid].cpu().clone()
        basis = fit_display(seen)
        lift = space.to("cpu").lift
        displays[name] = DisplayBasis(lift(basis.mean), lift(basis.components), basis.low, basis.high)
    return displays
