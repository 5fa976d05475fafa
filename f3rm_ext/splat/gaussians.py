"""Gaussians as they are stored, and the meaning of their numbers.

Names and layout are those of nerfstudio's splatfacto, so its checkpoints open without translation.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32
from torch import Tensor
from torch.nn import functional

from f3rm_ext.errors import ConfigError

MAX_SH_DEGREE = 3
SH_C0 = 0.28209479177387814
"""Value of the spherical harmonic of degree 0: 1 / (2 √π)."""


def sh_rest_count(degree: int) -> int:
    """Returns the number of SH coefficients per colour beyond the first, (degree + 1)² − 1.

    >>> tuple(sh_rest_count(degree) for degree in range(4))
    (0, 3, 8, 15)
    """
    return (degree + 1) ** 2 - 1


def degree_from_count(rest_count: int) -> int:
    """Returns the SH degree that has this number of coefficients beyond the first.

    Raises:
        ConfigError: no degree from 0 to 3 has that many.

    >>> degree_from_count(8)
    2
    """
    for degree in range(MAX_SH_DEGREE + 1):
        if sh_rest_count(degree) == rest_count:
            return degree
    raise ConfigError(
        f"{rest_count} SH coefficients per colour belong to no degree from 0 to {MAX_SH_DEGREE}, which have "
        f"{', '.join(str(sh_rest_count(d)) for d in range(MAX_SH_DEGREE + 1))}: export the splats again."
    )


def rgb_to_sh(rgb: Float[Tensor, "*batch 3"]) -> Float[Tensor, "*batch 3"]:
    """Returns the degree-0 SH coefficients of colours in 0..1.

    >>> sh_to_rgb(rgb_to_sh(torch.tensor([0.0, 0.5, 1.0])))
    tensor([0.0000, 0.5000, 1.0000])
    """
    return (rgb - 0.5) / SH_C0


def sh_to_rgb(sh: Float[Tensor, "*batch 3"]) -> Float[Tensor, "*batch 3"]:
    """Returns the colours, not clamped, of degree-0 SH coefficients."""
    return sh * SH_C0 + 0.5


@dataclass
class Gaussians:
    """Anisotropic Gaussians with spherical-harmonic colours, before any activation function."""

    means: Float[Tensor, "gaussians 3"]
    """Centres, scene frame."""
    scales: Float[Tensor, "gaussians 3"]
    """Natural logarithms of the standard deviations along each Gaussian's own axes, scene units."""
    quats: Float[Tensor, "gaussians 4"]
    """Rotations from own axes to the scene frame, (w, x, y, z), any length but 0."""
    opacities: Float[Tensor, "gaussians 1"]
    """Logits of the opacities."""
    features_dc: Float[Tensor, "gaussians 3"]
    """SH coefficients of degree 0; red, green, blue."""
    features_rest: Float[Tensor, "gaussians coeffs 3"]
    """SH coefficients of degrees 1 and up: 0, 3, 8 or 15; float32 or float16."""

    def __len__(self) -> int:
        return len(self.means)

    @property
    def sh_degree(self) -> int:
        """SH degree of the colours."""
        return degree_from_count(self.features_rest.shape[1])

    def sizes(self) -> Float[Tensor, "gaussians 3"]:
        """Returns standard deviations along the own axes, scene units."""
        return self.scales.exp()

    def alphas(self) -> Float[Tensor, " gaussians"]:
        """Returns opacities, 0 to 1."""
        return self.opacities.sigmoid().squeeze(-1)

    def rotations(self) -> Float[Tensor, "gaussians 3 3"]:
        """Returns matrices whose columns are the own axes in the scene frame."""
        return quats_to_rotations(self.quats)

    def normals(self) -> Float[Tensor, "gaussians 3"]:
        """Returns the axes of the smallest standard deviations: unit vectors, scene frame, either sign."""
        return smallest_axes(self.rotations(), self.scales)

    def require_finite(self, source: str) -> "Gaussians":
        """Returns the Gaussians after checking that there are any and that all values are finite.

        Raises:
            ConfigError: there are none, or some values are NaN or infinite.
        """
        if not len(self):
            raise ConfigError(f"There are no Gaussians in {source}: choose another file.")
        for name, value in self.tensors().items():
            bad = int((~torch.isfinite(value).flatten(1).all(dim=1)).sum())
            if bad:
                raise ConfigError(
                    f"{bad} of {len(self)} Gaussians in {source} have NaN or infinite {name}: remove them first."
                )
        return self

    def tensors(self) -> dict[str, Tensor]:
        """Returns all tensors by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "Gaussians":
        """Creates Gaussians from tensors by name; ignores other names."""
        return cls(**{field.name: tensors[field.name] for field in fields(cls)})

    def arrays(self) -> dict[str, Float32[np.ndarray, "gaussians *rest"]]:
        """Returns all tensors, which are on the CPU, as arrays by name."""
        return {name: value.detach().float().numpy() for name, value in self.tensors().items()}

    @classmethod
    def from_arrays(cls, *arrays: np.ndarray) -> "Gaussians":
        """Creates Gaussians, float32, from arrays in the order of the fields."""
        return cls(*(torch.from_numpy(array.astype(np.float32, copy=False)) for array in arrays))

    def __getitem__(self, index: Tensor | slice) -> "Gaussians":
        """Selects Gaussians by index, slice or mask."""
        return Gaussians.from_tensors({name: value[index] for name, value in self.tensors().items()})

    def to(self, device: torch.device | str) -> "Gaussians":
        """Moves all tensors to a device."""
        return Gaussians.from_tensors({name: value.to(device) for name, value in self.tensors().items()})

    def to_sh_degree(self, degree: int) -> "Gaussians":
        """Drops coefficients of higher degrees, or appends zeros for new ones."""
        return replace(self, features_rest=resize_harmonics(self.features_rest, degree))


class Ellipsoids(NamedTuple):
    """Gaussians as rasterisers take them: after activation, widened by the 3D filter if it is on, without colours."""

    means: Float[Tensor, "gaussians 3"]
    """Centres, scene frame."""
    quats: Float[Tensor, "gaussians 4"]
    """Rotations from own axes to the scene frame, (w, x, y, z), any length but 0."""
    sizes: Float[Tensor, "gaussians 3"]
    """Standard deviations along the own axes, scene units."""
    alphas: Float[Tensor, " gaussians"]
    """Opacities, 0 to 1."""

    def map(self, change: Callable[[Tensor], Tensor]) -> "Ellipsoids":
        """Applies a function to each tensor."""
        return Ellipsoids(*map(change, self))


def resize_harmonics(rest: Float[Tensor, "gaussians coeffs 3"], degree: int) -> Float[Tensor, "gaussians new 3"]:
    """Drops coefficients of higher degrees, or appends zeros for new ones."""
    count, have = sh_rest_count(degree), rest.shape[1]
    return rest[:, :count] if count <= have else functional.pad(rest, (0, 0, 0, count - have))


def quats_to_rotations(quats: Float[Tensor, "*batch 4"]) -> Float[Tensor, "*batch 3 3"]:
    """Returns the rotation matrices of quaternions (w, x, y, z), which need not have length 1.

    >>> quats_to_rotations(torch.tensor([0.0, 0.0, 0.0, 2.0])).diagonal()  # half a turn about z
    tensor([-1., -1.,  1.])
    """
    w, x, y, z = functional.normalize(quats, dim=-1).unbind(-1)
    rows = (
        (1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)),
        (2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)),
        (2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)),
    )
    return torch.stack([torch.stack(row, dim=-1) for row in rows], dim=-2)


def smallest_axes(
    rotations: Float[Tensor, "gaussians 3 3"], scales: Float[Tensor, "gaussians 3"]
) -> Float[Tensor, "gaussians 3"]:
    """Returns the columns of rotations that belong to the smallest scales."""
    smallest = scales.argmin(dim=1)
    return rotations.gather(2, smallest[:, None, None].expand(-1, 3, 1)).squeeze(-1)
