"""What the panel takes from the model itself: the feature a click hits, and the colours that suit a view.

Both render, so they need the model to themselves (nerfstudio's training lock) and no weights of any extractor.
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
from f3rm_ext.query.queryable import Queryable, QueryHead

SOLID = 0.5
"""Opacity from which there is something to see."""
FIT_RAYS = 4096
"""About how many rays of a view the colours are fitted to."""
_FEW_RAYS = 16
_NARROW = 1000.0
"""Focal length in pixels of a camera of one pixel: next to nothing but its middle ray."""


@dataclass(frozen=True)
class Ray:
    """A click: a half-line in the scene frame."""

    origin: tuple[float, float, float]
    direction: tuple[float, float, float]
    """Of any length above 0."""

    @classmethod
    def of_click(cls, origin: Sequence[float | int], direction: Sequence[float | int]) -> "Ray":
        """From what a page sends, where whole numbers come as integers."""
        (x, y, z), (u, v, w) = map(float, origin), map(float, direction)
        return cls((x, y, z), (u, v, w))


@dataclass(frozen=True)
class Viewpoint:
    """What a page of the viewer shows."""

    camera: Cameras
    obb_box: OrientedBox | None = None
    """The crop box, where cropping is on."""


@contextmanager
def not_training(model: Queryable) -> Iterator[None]:
    """The model as it is outside of training, for a while."""
    before = model.training
    model.train(False)
    try:
        yield
    finally:
        model.train(before)


def camera_along(ray: Ray) -> Cameras:
    """A camera of one pixel that sees just the ray."""
    back = -functional.normalize(torch.tensor(ray.direction, dtype=torch.float32), dim=0)
    aside = torch.eye(3)[int(back.abs().argmin())]
    right = functional.normalize(torch.linalg.cross(aside, back), dim=0)
    up = torch.linalg.cross(back, right)
    pose = torch.stack([right, up, back, torch.tensor(ray.origin, dtype=torch.float32)], dim=1)
    return Cameras(pose[None], fx=_NARROW, fy=_NARROW, cx=0.5, cy=0.5, width=1, height=1)


def clicked_feature(
    model: Queryable, head: QueryHead, ray: Ray, name: str, obb_box: OrientedBox | None = None
) -> tuple[Embeddings, tuple[float, float, float]]:
    """The feature that is rendered along a ray, and where in the scene frame the ray ends.

    Args:
        model: the model.
        head: which of its features.
        ray: where to look.
        name: what the feature is to be called.
        obb_box: nothing outside of it is seen.

    Raises:
        ConfigError: the ray meets nothing, or nothing that has this feature.
    """
    space = head.space()
    extra: dict[str, ExtraOutput] = {"clicked": lambda _, rendered_of: space.coordinates(rendered_of(head.name))}
    with not_training(model), torch.inference_mode():
        outputs = model.render_camera(camera_along(ray), extra, obb_box)
    if float(outputs["accumulation"].reshape(-1)[0]) < SOLID:
        raise ConfigError("Nothing is where you clicked: click on something solid.")
    values = space.lift(outputs["clicked"].reshape(1, -1)).clone()
    # How much of the full feature the codes leave out is known on average.
    left_out = values.norm(dim=1) * (1.0 / space.energy - 1.0) ** 0.5 if space.energy < 1.0 else None
    depth = float(outputs["depth"].reshape(-1)[0])
    direction = functional.normalize(torch.tensor(ray.direction), dim=0)
    x, y, z = (torch.tensor(ray.origin) + depth * direction).tolist()
    return Embeddings.of_codes(values, (name,), left_out), (x, y, z)


def fitted_displays(model: Queryable, sight: Viewpoint) -> dict[str, DisplayBasis]:
    """The projection to colours of each feature that tells apart best what is seen in a view.

    Args:
        model: the model.
        sight: the view; it is rendered small.

    Raises:
        ConfigError: the model has no features, or the view is all but empty.
    """
    heads = model.query_heads()
    if not heads:
        raise ConfigError("There are no features whose colours could be refitted: train with some.")
    camera = copy.deepcopy(sight.camera)
    pixels = int(camera.height.item()) * int(camera.width.item())
    if pixels > FIT_RAYS:
        camera.rescale_output_resolution((FIT_RAYS / pixels) ** 0.5)
    spaces = {name: head.space() for name, head in heads.items()}
    extra: dict[str, ExtraOutput] = {
        f"seen {name}": lambda _, rendered_of, name=name: spaces[name].coordinates(rendered_of(name)) for name in heads
    }
    with not_training(model), torch.inference_mode():
        outputs = model.render_camera(camera, extra, sight.obb_box)
    solid = outputs["accumulation"].reshape(-1) >= SOLID
    if int(solid.sum()) < _FEW_RAYS:
        raise ConfigError("There is next to nothing in this view that colours could be fitted to: look at the scene.")
    displays = {}
    for name, space in spaces.items():
        seen = outputs[f"seen {name}"].flatten(0, 1)[solid].cpu().clone()
        basis = fit_display(seen)
        lift = space.to("cpu").lift
        displays[name] = DisplayBasis(lift(basis.mean), lift(basis.components), basis.low, basis.high)
    return displays
