"""Options of synthetic captures and pictures."""

from dataclasses import dataclass
from typing import Annotated

from f3rm_ext.utils.ranges import Range


@dataclass
class SynthConfig:
    """Options of the synthetic capture."""

    num_images: Annotated[int, Range(3, 99999)] = 60
    """Number of views around the table, ≥ 3: training takes two, and one at least is held out."""
    width: Annotated[int, Range(8, 8192)] = 480
    """Image width in pixels, 8-8192."""
    height: Annotated[int, Range(8, 8192)] = 360
    """Image height in pixels, 8-8192."""
    fov: Annotated[float, Range(10, 120)] = 56.0
    """Horizontal field of view in degrees, 10-120."""
    seed: Annotated[int, Range(0, 2**63 - 1)] = 0
    """Number of the scene, ≥ 0. It determines places, colours, paintings, sun and cameras."""
    samples: Annotated[int, Range(1, 8)] = 2
    """Colour samples along each side of a pixel, 1-8; 2 means four rays per pixel."""
    shiny: bool = True
    """Glaze, varnish and metal reflect the room; otherwise every surface is matt."""
    bounces: Annotated[int, Range(0, 8)] = 2
    """Number of mirror-like reflections that a ray is followed through, 0-8."""
    light_rays: Annotated[int, Range(1, 1024)] = 32
    """Rays per mesh vertex that gather the light between surfaces, 1-1024. Fewer are faster and blotchier."""
    holdout_every: Annotated[int, Range(2, 99999)] = 8
    """Every n-th view is held out for evaluation (val and test), n ≥ 2."""
    overwrite: bool = False
    """Replace a synthetic capture in the folder. Other files there are kept."""


@dataclass
class PictureConfig:
    """Options of a single picture of the room."""

    width: Annotated[int, Range(8, 8192)] = 1200
    """Width in pixels, 8-8192."""
    height: Annotated[int, Range(8, 8192)] = 800
    """Height in pixels, 8-8192."""
    fov: Annotated[float, Range(10, 120)] = 52.0
    """Horizontal field of view in degrees, 10-120."""
    seed: Annotated[int, Range(0, 2**63 - 1)] = 0
    """Number of the scene, ≥ 0."""
    samples: Annotated[int, Range(1, 8)] = 3
    """Colour samples along each side of a pixel, 1-8."""
    shiny: bool = True
    """Glaze, varnish and metal reflect the room; otherwise every surface is matt."""
    bounces: Annotated[int, Range(0, 8)] = 3
    """Number of mirror-like reflections that a ray is followed through, 0-8."""
    light_rays: Annotated[int, Range(1, 1024)] = 64
    """Rays per mesh vertex that gather the light between surfaces, 1-1024."""
    azimuth: Annotated[float, Range(-360, 360)] = 115.0
    """Direction from the table to the camera in degrees, anticlockwise from the x axis, -360 to 360."""
    eye_height: Annotated[float, Range(0.9, 2.5)] = 1.42
    """Height of the camera in metres, 0.9-2.5."""
    distance: Annotated[float, Range(0.9, 2.2)] = 1.62
    """Distance of the camera from the middle of the table in metres, 0.9-2.2."""
    maps: bool = False
    """Add a strip with depth, normals and labels below the picture."""
    overwrite: bool = False
    """Replace an existing file."""
