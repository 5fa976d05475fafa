"""Gradients of spherical harmonics in the form they come in: a direction and three numbers for each visible Gaussian.

A picture depends on the coefficients of a Gaussian through its one colour, c = Σ_k Y_k(d) f_k, so that ∂L/∂f_k =
Y_k(d) ∂L/∂c: 6 numbers and a row number instead of 45, and none at all for Gaussians the picture does not show. The
optimiser multiplies them out, a few rows at a time.
"""

from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from f3rm_ext.errors import ConfigError
from f3rm_ext.splat.gaussians import MAX_SH_DEGREE, SH_C0, sh_rest_count
from f3rm_ext.splat.rasterize.spherical_harmonics import sh_bases

_ATTRIBUTE = "packed_gradient"
CHUNK_CPU, CHUNK = 1 << 12, 1 << 17
"""Gaussians whose coefficients are read at a time: on a GPU 24 MB at degree 3, on a CPU what fits its cache."""


@dataclass
class ColorGradient:
    """Gradient of one picture by the coefficients of some Gaussians."""

    rows: Int[Tensor, " visible"]
    """Which Gaussians, ascending."""
    directions: Float[Tensor, "visible 3"]
    """Where they were seen, length 1."""
    colors: Float[Tensor, "visible 3"]
    """Gradient by their colours."""
    degree: int
    """SH degree of the picture."""

    def coefficients(self, part: slice | Tensor) -> Float[Tensor, "part coeffs 3"]:
        """Gradient by the coefficients of some of the visible Gaussians, multiplied out."""
        bases = sh_bases(self.degree, self.directions[part])
        return bases[:, :, None] * self.colors[part, None, :]


@dataclass
class PackedGradient:
    """What has been gathered for a parameter since the last step: one entry per picture."""

    pictures: list[ColorGradient] = field(default_factory=list)

    def rows(self) -> Int[Tensor, " visible"]:
        """Gaussians that any picture shows, ascending."""
        if len(self.pictures) == 1:
            return self.pictures[0].rows
        return torch.cat([picture.rows for picture in self.pictures]).unique()

    def multiplied(self, rows: Int[Tensor, " part"], start: int, coeffs: int) -> Float[Tensor, "part coeffs 3"]:
        """Gradient by the coefficients of some Gaussians, as a tensor of its own.

        Args:
            rows: which of :meth:`rows`.
            start: their place in :meth:`rows`.
            coeffs: how many coefficients there are.
        """
        if len(self.pictures) == 1:
            (picture,) = self.pictures
            gradient = picture.coefficients(slice(start, start + len(rows)))
            missing = coeffs - gradient.shape[1]
            return functional.pad(gradient, (0, 0, 0, missing)) if missing else gradient
        out = torch.zeros(len(rows), coeffs, 3, device=rows.device)
        for picture in self.pictures:
            if len(picture.rows):
                place = torch.searchsorted(picture.rows, rows).clamp_(max=len(picture.rows) - 1)
                here = (picture.rows[place] == rows).nonzero().squeeze(-1)
                out[here, : sh_rest_count(picture.degree)] += picture.coefficients(place[here])
        return out

    def nbytes(self) -> int:
        """Bytes held."""
        return sum(t.nbytes for p in self.pictures for t in (p.rows, p.directions, p.colors))


def packed_gradient(parameter: Tensor) -> PackedGradient | None:
    """The gradient gathered beside a parameter; None where there is none."""
    return getattr(parameter, _ATTRIBUTE, None)


def forget_gradient(parameter: Tensor) -> None:
    """Drops the gradient gathered beside a parameter."""
    parameter.grad = None
    if packed_gradient(parameter) is not None:
        delattr(parameter, _ATTRIBUTE)


def _gather(parameter: Tensor, picture: ColorGradient) -> None:
    gradient = packed_gradient(parameter)
    if gradient is None:
        gradient = PackedGradient()
        setattr(parameter, _ATTRIBUTE, gradient)
    gradient.pictures.append(picture)
    if parameter.grad is None:
        # Nerfstudio steps an optimiser only where a gradient is set. This one is a single number in memory.
        parameter.grad = parameter.new_zeros(()).expand(parameter.shape)


class _StoredHarmonics(torch.autograd.Function):
    """Σ_k Y_k(d) f_k of coefficients in any dtype; the gradient by them is gathered beside the parameter."""

    @staticmethod
    def forward(ctx, directions: Tensor, storage: Tensor, owner: list[Tensor], degree: int) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(directions)
        ctx.owner, ctx.degree = owner, degree
        colors = torch.empty_like(directions)
        for part in _parts(directions):
            bases = sh_bases(degree, directions[part])
            colors[part] = torch.einsum("nk,nkc->nc", bases, _coefficients(storage, part, degree))
        return colors

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, None, None, None]:  # type: ignore[override]
        (directions,) = ctx.saved_tensors
        storage = ctx.owner[0]
        rows = gradient.any(dim=1).nonzero().squeeze(-1)
        by_direction = None
        if ctx.needs_input_grad[0]:
            by_direction = torch.zeros_like(directions)
            for part in rows.split(_chunk(rows)):
                with torch.enable_grad():
                    leaf = directions.detach()[part].requires_grad_()
                    bases = sh_bases(ctx.degree, leaf)
                weights = torch.einsum("nc,nkc->nk", gradient[part], _coefficients(storage, part, ctx.degree))
                by_direction[part] = torch.autograd.grad(bases, leaf, weights)[0]
        if ctx.needs_input_grad[1]:
            _gather(storage, ColorGradient(rows, directions[rows], gradient[rows], ctx.degree))
        return by_direction, None, None, None


def _chunk(on: Tensor) -> int:
    return CHUNK_CPU if on.device.type == "cpu" else CHUNK


def _parts(of: Tensor) -> list[slice]:
    return [slice(start, start + _chunk(of)) for start in range(0, len(of), _chunk(of))]


def _coefficients(storage: Tensor, part: slice | Tensor, degree: int) -> Tensor:
    return storage.detach()[part, : sh_rest_count(degree)].float()


def stored_sh_colors(
    degree: int,
    directions: Float[Tensor, "gaussians 3"],
    features_dc: Float[Tensor, "gaussians 3"],
    features_rest: Float[Tensor, "gaussians coeffs 3"],
) -> Float[Tensor, "gaussians 3"]:
    """Colours as :func:`f3rm_ext.splat.rasterize.spherical_harmonics.sh_colors` has them, with little memory.

    Nothing of the size of the coefficients is allocated, in float32 or otherwise, forward or backward. The gradient
    by `features_rest` is gathered beside it for :class:`f3rm_ext.splat.memory.adam.PackedAdam`; its ``.grad`` is a
    mark that holds zeros, for which gradient clipping and gradient scalers have no use.

    Args:
        degree: highest degree that counts, 0 to 3.
        directions: from the camera to the Gaussians, scene frame, of any length.
        features_dc: coefficients of degree 0, float32.
        features_rest: the parameter itself, float32 or float16: it has to be a leaf.

    Raises:
        ConfigError: if there are fewer coefficients than the degree asks for.
        ValueError: if `features_rest` was computed from a parameter, whose gradient would get lost.
    """
    if features_rest.requires_grad and not features_rest.is_leaf:
        raise ValueError("stored_sh_colors takes the parameter itself; for some of its rows use sh_colors.")
    if not 0 <= degree <= MAX_SH_DEGREE or sh_rest_count(degree) > features_rest.shape[1]:
        raise ConfigError(
            f"Colours of SH degree {degree} need {sh_rest_count(degree)} coefficients beyond the first and there are "
            f"{features_rest.shape[1]}: ask for a lower degree."
        )
    colors = SH_C0 * features_dc + 0.5
    if degree > 0:
        units = functional.normalize(directions, dim=-1)
        colors = colors + _StoredHarmonics.apply(units, features_rest, [features_rest], degree)  # type: ignore[operator]
    return colors.clamp(min=0.0)
