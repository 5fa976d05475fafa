"""Options of extraction and of textures, as ``f3rm-ext export`` shows them."""

from dataclasses import dataclass
from typing import Annotated, Literal

from f3rm_ext.errors import ConfigError
from f3rm_ext.utils.ranges import Count, Positive, Range, check_ranges

Share = Annotated[float, Range(0, 1)]
Length = Annotated[float, Range(0)]


@dataclass(frozen=True)
class ExtractionOptions:
    """How to extract a mesh. Lengths are in the units of --frame on the command line, in scene units elsewhere."""

    method: Literal["tsdf", "level-set", "poisson-centres"] = "tsdf"
    """Algorithm that finds the surface."""
    voxel: Length = 0.0
    """Side of the voxels in units of --frame; tsdf. 0 takes the width of a pixel on the surface, or more where the mesh
    would have more than about a million vertices."""
    unbounded: bool = False
    """For scenes without walls around them: from a box around the cameras outwards, voxels double in width each time
    that the distance doubles; tsdf."""
    thin_parts: bool = True
    """Fuse leaves and other thin things from each side by itself, since distances from both sides cancel out; tsdf."""
    fill_holes: bool = False
    """Where photos look through a hole of the mesh, fuse the rendered depth although too few views agree on it; tsdf.
    A guess in place of nothing."""
    min_views: Count = 2
    """Number of views that must agree on a pixel's depth, itself included, 1 or more; tsdf and level-set."""
    tolerance: Positive = 0.02
    """Largest difference between depths that agree, as a share of the depth, above 0; tsdf and level-set."""
    level: Positive = 0.3
    """Density of the surface, above 0; level-set. SuGaR uses 0.1, 0.3 or 0.5."""
    points: Count = 2_000_000
    """Number of rays on which the surface is searched, 1 or more; level-set."""
    poisson_depth: Annotated[int, Range(4, 14)] = 10
    """Depth of the octree, 4 to 14; each further level halves the size of its cells; level-set and poisson-centres."""
    trim: Annotated[float, Range(0, 1, below=True)] = 0.1
    """Share of the vertices to remove where points are rarest, 0 to below 1; level-set and poisson-centres."""
    min_part: Share = 0.001
    """Drop connected parts with a smaller share of the area, 0 to 1."""
    close_holes: Length = 0.0
    """Close holes up to this radius in units of --frame; 0 closes none."""
    vertices: Annotated[int, Range(4)] | None = None
    """Simplify to at most this many vertices, 4 or more; by default all are kept."""

    def __post_init__(self) -> None:
        check_ranges(self)
        for name in ("unbounded", "fill_holes"):
            if getattr(self, name) and self.method != "tsdf":
                raise ConfigError(
                    f"--{name.replace('_', '-')} only works with --method tsdf, but --method is {self.method}: leave "
                    "one of them out."
                )


@dataclass(frozen=True)
class TextureOptions:
    """Options of the texture that a mesh gets from the photos."""

    texture_size: Annotated[int, Range(64, 8192)] | None = None
    """Side of the texture in pixels, 64 to 8192. By default the power of two that fits the photos."""
    padding: Annotated[int, Range(1, 64)] = 4
    """Free texels between charts, 1 to 64."""
    balance_exposure: bool = True
    """Balance differences of exposure and white balance between photos, by one factor for each photo and channel."""

    def __post_init__(self) -> None:
        check_ranges(self)
