"""The fields of density and colour: proposal fields, the scene field and normals from its density."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from jaxtyping import Float, Int
from nerfstudio.field_components.activations import trunc_exp
from nerfstudio.utils.math import components_from_spherical_harmonics
from torch import Tensor, nn
from torch.nn import functional

from f3rm_ext.nerf.contraction import box_to_unit_cube, contract_to_unit_cube, measure_reach_factor
from f3rm_ext.nerf.hash_backends import Backend
from f3rm_ext.nerf.hash_grid import HashGrid
from f3rm_ext.nerf.mlp import Mlp, RaySplitMlp
from f3rm_ext.utils.ranges import Range

SH_LEVELS = 4
"""Spherical-harmonic bands of the view direction: 16 values."""


def choose_init_density(background: str, metadata: Mapping[str, Any]) -> float:
    """Chooses the initial density, per scene unit, of short runs.

    A run of minutes that begins with hardly any density explains plain surfaces, such as a table, by what is far behind
    them. Before black or white, however, any density of this colour fits most pixels, and the object is not found.

    Args:
        metadata: of the training photos, in training with ``camera_reach``, the largest coordinate of a camera, scene
            units; see :func:`measure_reach_factor`, too.
    """
    if background in ("black", "white"):
        return 0.01
    return 1 / max(metadata.get("camera_reach", 1.0) * measure_reach_factor(metadata), 1e-3)


@dataclass
class GridOptions:
    """Size of one hash grid."""

    num_levels: Annotated[int, Range(1, 32)] = 16
    """Number of resolutions, 1 to 32."""
    features_per_level: Annotated[int, Range(1, 8)] = 2
    """Values stored per vertex: 1, 2, 4 or 8."""
    base_res: Annotated[int, Range(2)] = 16
    """Vertices per axis of the coarsest level, over the contracted scene, 2 or more."""
    max_res: Annotated[int, Range(2)] = 2048
    """Vertices per axis of the finest level, base-res or more."""
    log2_hashmap_size: int = 19
    """Binary logarithm of the largest number of table rows per level, 14 to 22."""

    def build(self, backend: Backend) -> HashGrid:
        return HashGrid(**vars(self), backend=backend)


class UnitCube(nn.Module):
    """Maps the scene frame to the cube that hash grids cover, and masks points that must not have density.

    Args:
        contract: whether space outside the box is contracted into the cube; otherwise it is empty.
        radius: half the side of the box that is not contracted, scene units.
    """

    aabb: Tensor

    def __init__(self, aabb: Float[Tensor, "2 3"], contract: bool, radius: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("aabb", aabb, persistent=False)
        self.contract, self.radius = contract, radius

    def forward(
        self, positions: Float[Tensor, "*batch 3"]
    ) -> tuple[Float[Tensor, "*batch 3"], Float[Tensor, "*batch 1"] | None]:
        """Returns positions in [0, 1]³ and, for bounded scenes, 1 for positions inside the box and 0 outside."""
        if self.contract:
            return contract_to_unit_cube(positions, self.radius), None
        return box_to_unit_cube(positions, self.aabb)


class ProposalField(nn.Module):
    """A small density field that decides where along a ray to sample (mip-NeRF 360, section 3).

    Args:
        init_density: initial density everywhere, per scene unit.
    """

    def __init__(
        self, cube: UnitCube, grid: GridOptions, hidden_dim: int, init_density: float, backend: Backend
    ) -> None:
        super().__init__()
        self.cube = cube
        self.grid = grid.build(backend)
        self.mlp = Mlp(self.grid.out_dim, hidden_dim, num_hidden=1, out_dim=1)
        self.init_density = init_density

    def density(self, positions: Float[Tensor, "rays samples 3"]) -> Float[Tensor, "rays samples 1"]:
        """Returns the volume density at positions in the scene frame, float32."""
        unit, inside = self.cube(positions)
        raw = self.mlp(self.grid(unit.reshape(-1, 3))).view(*positions.shape[:-1], 1)
        density = self.init_density * trunc_exp(raw.float())
        return density if inside is None else density * inside


class SceneField(nn.Module):
    """Density and view-dependent colour, as in nerfacto: hash grid → MLP → density and 15 values → MLP → RGB.

    Args:
        appearance_dim: length of the per-image appearance code; 0 for none.
        init_density: initial density everywhere, per scene unit.
    """

    GEOMETRY_DIM = 15

    def __init__(
        self,
        cube: UnitCube,
        grid: GridOptions,
        *,
        hidden_dim: int,
        color_hidden_dim: int,
        appearance_dim: int,
        num_images: int,
        init_density: float,
        backend: Backend,
    ) -> None:
        super().__init__()
        self.cube = cube
        self.grid = grid.build(backend)
        self.density_mlp = Mlp(self.grid.out_dim, hidden_dim, num_hidden=1, out_dim=1 + self.GEOMETRY_DIM)
        self.color_mlp = RaySplitMlp(
            SH_LEVELS**2 + appearance_dim, self.GEOMETRY_DIM, color_hidden_dim, num_hidden=2, out_dim=3
        )
        self.appearance = nn.Embedding(num_images, appearance_dim) if appearance_dim else None
        if self.appearance is not None:
            # Evaluation uses the mean code, which stays close to every image's code if all start at zero.
            nn.init.zeros_(self.appearance.weight)
        self.init_density = init_density

    def density(
        self, positions: Float[Tensor, "rays samples 3"], *, frozen: bool = False
    ) -> tuple[Float[Tensor, "rays samples 1"], Float[Tensor, "rays samples geometry"]]:
        """Returns volume density (float32) at positions in the scene frame, and geometry codes for :meth:`color`.

        Args:
            frozen: no gradient flows to the hash grid.
        """
        unit, inside = self.cube(positions)
        out = self.density_mlp(self.grid(unit.reshape(-1, 3), frozen=frozen)).view(*positions.shape[:-1], -1)
        raw, geometry = out.split([1, self.GEOMETRY_DIM], dim=-1)
        density = self.init_density * trunc_exp(raw.float())
        return (density if inside is None else density * inside), geometry

    def color(
        self,
        directions: Float[Tensor, "rays 3"],
        geometry: Float[Tensor, "rays samples geometry"],
        camera_indices: Int[Tensor, "rays"] | None,
    ) -> Float[Tensor, "rays samples 3"]:
        """Returns colours in [0, 1].

        Args:
            directions: unit view directions, scene frame.
            camera_indices: training image of each ray, which selects its appearance code; None takes the mean code.
        """
        per_ray = components_from_spherical_harmonics(levels=SH_LEVELS, directions=directions)
        if self.appearance is not None:
            if camera_indices is None:
                code = self.appearance.weight.mean(dim=0).expand(directions.shape[0], -1)
            else:
                code = self.appearance(camera_indices)
            per_ray = torch.cat([per_ray, code], dim=-1)
        return self.color_mlp(per_ray.to(geometry.dtype), geometry).float().sigmoid()


def render_normals(
    field: SceneField, positions: Float[Tensor, "rays samples 3"], weights: Float[Tensor, "rays samples 1"]
) -> Float[Tensor, "rays 3"]:
    """Renders normals, the negative gradient of log density, and maps them from [-1, 1] to [0, 1]."""
    with torch.enable_grad():
        points = positions.detach().requires_grad_(True)
        density, _ = field.density(points, frozen=True)
        # The logarithm's gradient has the same direction, and no exponential makes it vanish or overflow.
        (gradient,) = torch.autograd.grad(density.clamp(min=1e-10).log().sum(), points)
    normals = functional.normalize((weights.detach() * -functional.normalize(gradient, dim=-1)).sum(dim=-2), dim=-1)
    return (normals + 1.0) / 2.0
