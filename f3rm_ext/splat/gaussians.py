"""A set of Gaussians as it is stored, and what its numbers mean.

Names and layout are those of nerfstudio's splatfacto, so that its checkpoints open without translation.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from f3rm_ext.errors import ConfigError

MAX_SH_DEGREE = 3
SH_C0 = 0.28209479177387814
"""Value of the spherical harmonic of degree 0: 1 / (2 √π)."""


def sh_rest_count(degree: int) -> int:
    """Number of SH coefficients per colour beyond the first: (degree + 1)² − 1."""
    return (degree + 1) ** 2 - 1


def sh_degree_of(rest_count: int) -> int:
    """SH degree of a number of coefficients beyond the first.

    Raises:
        ConfigError: if no degree from 0 to 3 has that many.
    """
    for degree in range(MAX_SH_DEGREE + 1):
        if sh_rest_count(degree) == rest_count:
            return degree
    raise ConfigError(
        f"{rest_count} SH coefficients per colour belong to no degree from 0 to {MAX_SH_DEGREE}, which have "
        f"{', '.join(str(sh_rest_count(d)) for d in range(MAX_SH_DEGREE + 1))}: export the splats again."
    )


def rgb_to_sh(rgb: Float[Tensor, "*batch 3"]) -> Float[Tensor, "*batch 3"]:
    """Degree-0 SH coefficients of colours in 0..1."""
    return (rgb - 0.5) / SH_C0


def sh_to_rgb(sh: Float[Tensor, "*batch 3"]) -> Float[Tensor, "*batch 3"]:
    """Colours (unclamped) of degree-0 SH coefficients."""
    return sh * SH_C0 + 0.5


@dataclass
class Gaussians:
    """N anisotropic Gaussians with spherical-harmonic colours, before any activation function."""

    means: Float[Tensor, "gaussians 3"]
    """Centres, in the frame of the scene."""
    scales: Float[Tensor, "gaussians 3"]
    """Natural logarithms of the standard deviations along the three own axes, in scene units."""
    quats: Float[Tensor, "gaussians 4"]
    """Rotations from own axes to the scene, (w, x, y, z) of any length but 0."""
    opacities: Float[Tensor, "gaussians 1"]
    """Logits of the opacities."""
    features_dc: Float[Tensor, "gaussians 3"]
    """SH coefficients of degree 0, red green blue."""
    features_rest: Float[Tensor, "gaussians coeffs 3"]
    """SH coefficients of degrees 1 and up; 0, 3, 8 or 15 of them; float32 or float16."""

    def __len__(self) -> int:
        return len(self.means)

    @property
    def sh_degree(self) -> int:
        """Highest degree of the colours."""
        return sh_degree_of(self.features_rest.shape[1])

    def sizes(self) -> Float[Tensor, "gaussians 3"]:
        """Standard deviations along the own axes, in scene units."""
        return self.scales.exp()

    def alphas(self) -> Float[Tensor, " gaussians"]:
        """Opacities, 0 to 1."""
        return self.opacities.sigmoid().squeeze(-1)

    def rotations(self) -> Float[Tensor, "gaussians 3 3"]:
        """Matrices whose columns are the own axes in the scene."""
        return quats_to_rotations(self.quats)

    def normals(self) -> Float[Tensor, "gaussians 3"]:
        """Unit vectors along the axes of the smallest deviations, in the scene, of either sign."""
        return smallest_axes(self.rotations(), self.scales)

    def checked(self, source: str) -> "Gaussians":
        """These, if there are any and all their numbers are finite.

        Raises:
            ConfigError: otherwise; ``source`` is named.
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
        """All tensors by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "Gaussians":
        """From tensors by name; others are ignored."""
        return cls(**{field.name: tensors[field.name] for field in fields(cls)})

    def __getitem__(self, index: Tensor | slice) -> "Gaussians":
        """The Gaussians of an index or mask."""
        return Gaussians.of({name: value[index] for name, value in self.tensors().items()})

    def to(self, device: torch.device | str) -> "Gaussians":
        """The same on another device."""
        return Gaussians.of({name: value.to(device) for name, value in self.tensors().items()})

    def with_sh_degree(self, degree: int) -> "Gaussians":
        """With coefficients of higher degrees dropped, or zeros for those that are new."""
        return replace(self, features_rest=rest_of_degree(self.features_rest, degree))


def rest_of_degree(rest: Float[Tensor, "gaussians coeffs 3"], degree: int) -> Float[Tensor, "gaussians new 3"]:
    """Coefficients beyond the first, those of higher degrees dropped, or zeros for those that are new."""
    count, have = sh_rest_count(degree), rest.shape[1]
    return rest[:, :count] if count <= have else functional.pad(rest, (0, 0, 0, count - have))


def quats_to_rotations(quats: Float[Tensor, "*batch 4"]) -> Float[Tensor, "*batch 3 3"]:
    """Rotation matrices of quaternions (w, x, y, z), which need not have length 1."""
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
    """The columns of rotations that belong to the smallest scales."""
    smallest = scales.argmin(dim=1)
    return rotations.gather(2, smallest[:, None, None].expand(-1, 3, 1)).squeeze(-1)
