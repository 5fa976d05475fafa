"""Options of synthetic captures and pictures."""

from dataclasses import dataclass

from f3rm_ext.errors import ConfigError


@dataclass
class SynthConfig:
    """Options of the synthetic capture."""

    num_images: int = 60
    """Number of views around the table, ≥ 2."""
    width: int = 480
    """Image width in pixels, 8-8192."""
    height: int = 360
    """Image height in pixels, 8-8192."""
    fov: float = 56.0
    """Horizontal field of view in degrees, 10-120."""
    seed: int = 0
    """Number of the scene, ≥ 0. It determines places, colours, paintings, sun and cameras."""
    samples: int = 2
    """Colour samples along each side of a pixel, 1-8; 2 means four rays per pixel."""
    shiny: bool = True
    """Glaze, varnish and metal reflect the room; otherwise every surface is matt."""
    bounces: int = 2
    """Number of mirror-like reflections that a ray is followed through, 0-8."""
    light_rays: int = 32
    """Rays per mesh vertex that gather the light between surfaces, 1-1024. Fewer are faster and blotchier."""
    holdout_every: int = 8
    """Every n-th view is held out for evaluation (val and test), n ≥ 2."""
    overwrite: bool = False
    """Replace a synthetic capture in the folder. Other files there are kept."""

    def check(self) -> None:
        """Raises :class:`~f3rm_ext.errors.ConfigError` if an option is out of range."""
        _check_limits(self)


@dataclass
class PictureConfig:
    """Options of a single picture of the room."""

    width: int = 1200
    """Width in pixels, 8-8192."""
    height: int = 800
    """Height in pixels, 8-8192."""
    fov: float = 52.0
    """Horizontal field of view in degrees, 10-120."""
    seed: int = 0
    """Number of the scene, ≥ 0."""
    samples: int = 3
    """Colour samples along each side of a pixel, 1-8."""
    shiny: bool = True
    """Glaze, varnish and metal reflect the room; otherwise every surface is matt."""
    bounces: int = 3
    """Number of mirror-like reflections that a ray is followed through, 0-8."""
    light_rays: int = 64
    """Rays per mesh vertex that gather the light between surfaces, 1-1024."""
    azimuth: float = 115.0
    """Direction from the table to the camera in degrees, anticlockwise from the x axis, -360 to 360."""
    eye_height: float = 1.42
    """Height of the camera in metres, 0.9-2.5."""
    distance: float = 1.62
    """Distance of the camera from the middle of the table in metres, 0.9-2.2."""
    maps: bool = False
    """Add a strip with depth, normals and labels below the picture."""
    overwrite: bool = False
    """Replace an existing file."""

    def check(self) -> None:
        """Raises :class:`~f3rm_ext.errors.ConfigError` if an option is out of range."""
        _check_limits(self)


_LIMITS = {
    "num_images": (2, 99_999),
    "width": (8, 8192),
    "height": (8, 8192),
    "fov": (10, 120),
    "seed": (0, 2**63 - 1),
    "samples": (1, 8),
    "bounces": (0, 8),
    "light_rays": (1, 1024),
    "holdout_every": (2, 99_999),
    "azimuth": (-360, 360),
    "eye_height": (0.9, 2.5),
    "distance": (0.9, 2.2),
}


def _check_limits(config: SynthConfig | PictureConfig) -> None:
    for name, (low, high) in _LIMITS.items():
        value = getattr(config, name, low)
        if not low <= value <= high:
            option = "--" + name.replace("_", "-")
            raise ConfigError(f"{option} is {value}, but it must lie between {low} and {high}: choose such a value.")
