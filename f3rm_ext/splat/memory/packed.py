"""Packed gradients of spherical harmonics: a direction and the gradient of a colour for each visible Gaussian.

An image depends on the coefficients of a Gaussian only through its colour c = Σ_k Y_k(d) f_k, so ∂L/∂f_k =
Y_k(d) ∂L/∂c. Storing d and ∂L/∂c takes 6 numbers and an index instead of 45 numbers, and nothing for Gaussians outside
the image. The optimiser unpacks a few rows at a time.
"""

from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from f3rm_ext import compat
from f3rm_ext.engine.ranks import Ranks
from f3rm_ext.memory.shapes import chunks, kernel_device, lacks_values
from f3rm_ext.splat.gaussians import SH_C0, sh_rest_count
from f3rm_ext.splat.rasterize.spherical_harmonics import require_degree, sh_bases
from f3rm_ext.splat.triton_kernels import find_kernels

TRITON_KERNELS = "f3rm_ext.splat.memory.triton_adam"
"""Module of the optimiser's Triton kernel. Where that works, gradients stay as they come, for all Gaussians."""
_ATTRIBUTE = "packed_gradient"
CHUNK_CPU, CHUNK, CHUNK_KERNEL = 1 << 12, 1 << 17, 1 << 19
"""Gaussians whose coefficients are read at a time: 24 MB at degree 3 on a GPU, sized for the cache on a CPU; 100 MB for
gsplat's kernel, which evaluates them in one launch."""


@dataclass
class ColorGradient:
    """Gradient of one image with respect to the coefficients of its visible Gaussians.

    It may come for all Gaussians, with zeros where they are not visible. The visible ones are then chosen by
    :meth:`choose` when they are first read, for which the host waits for a GPU.
    """

    rows: Int[Tensor, " visible"] | None
    """Indices of the Gaussians, ascending; None for all."""
    directions: Float[Tensor, "visible 3"]
    """Directions from the camera to the Gaussians, of length 1."""
    colors: Float[Tensor, "visible 3"]
    """Gradients with respect to their colours."""
    degree: int
    """SH degree of the image."""

    def choose(self) -> Int[Tensor, " visible"]:
        """Drops the Gaussians that are not visible. Returns the indices of the others, ascending."""
        if self.rows is None:
            self.rows = self.colors.any(dim=1).nonzero().squeeze(-1)
            self.directions, self.colors = self.directions[self.rows], self.colors[self.rows]
        return self.rows

    def expand(self, count: int) -> tuple[Float[Tensor, "gaussians 3"], Float[Tensor, "gaussians 3"]]:
        """Returns directions and gradients for all Gaussians, 0 where not visible, without waiting for a GPU."""
        if self.rows is None:
            return self.directions, self.colors
        empty = self.colors.new_zeros(count, 3)
        return empty.index_copy(0, self.rows, self.directions), empty.index_copy(0, self.rows, self.colors)

    def coefficients(self, part: slice | Tensor) -> Float[Tensor, "part coeffs 3"]:
        """Unpacks the gradient with respect to the coefficients of some of the chosen Gaussians."""
        bases = sh_bases(self.degree, self.directions[part])
        return bases[:, :, None] * self.colors[part, None, :]


@dataclass
class PackedGradient:
    """Gradients gathered for a parameter since the last step: one entry per image."""

    pictures: list[ColorGradient] = field(default_factory=list)

    def rows(self) -> Int[Tensor, " visible"]:
        """Returns the Gaussians visible in any image, ascending."""
        if len(self.pictures) == 1:
            return self.pictures[0].choose()
        return torch.cat([picture.choose() for picture in self.pictures]).unique()

    def expand(
        self, count: int
    ) -> tuple[Float[Tensor, "images gaussians 3"], Float[Tensor, "images gaussians 3"], int] | None:
        """Returns directions, gradients of colours and the SH degree of the images.

        None if their degrees differ or are 0.
        """
        degrees = {picture.degree for picture in self.pictures}
        if len(degrees) != 1 or degrees == {0}:
            return None
        directions, colors = zip(*(picture.expand(count) for picture in self.pictures), strict=True)
        degree = degrees.pop()
        if len(self.pictures) == 1:
            return directions[0][None], colors[0][None], degree
        return torch.stack(directions), torch.stack(colors), degree

    def unpack(self, rows: Int[Tensor, " part"], start: int, coeffs: int) -> Float[Tensor, "part coeffs 3"]:
        """Unpacks the gradient with respect to the coefficients of some Gaussians, as a new tensor.

        Args:
            rows: a consecutive part of :meth:`rows`.
            start: position of that part in :meth:`rows`.
        """
        if len(self.pictures) == 1:
            (picture,) = self.pictures
            picture.choose()
            gradient = picture.coefficients(slice(start, start + len(rows)))
            missing = coeffs - gradient.shape[1]
            return functional.pad(gradient, (0, 0, 0, missing)) if missing else gradient
        out = torch.zeros(len(rows), coeffs, 3, device=rows.device)
        for picture in self.pictures:
            seen = picture.choose()
            if len(seen):
                place = torch.searchsorted(seen, rows).clamp_(max=len(seen) - 1)
                here = (seen[place] == rows).nonzero().squeeze(-1)
                out[here, : sh_rest_count(picture.degree)] += picture.coefficients(place[here])
        return out


def packed_gradient(parameter: Tensor) -> PackedGradient | None:
    """Returns the packed gradient of a parameter; None if there is none."""
    return getattr(parameter, _ATTRIBUTE, None)


def gather_gradient(parameter: Tensor, ranks: Ranks) -> bool:
    """Gives a parameter the packed gradients of all ranks, in the order of the ranks: 28 bytes per visible Gaussian.

    Args:
        parameter: has a gradient on at least one rank.

    Returns:
        Whether gradients are packed; if not, nothing is done.
    """
    own = packed_gradient(parameter)
    pictures = [] if own is None else own.pictures
    most = max(count for (count,) in ranks.share([-1 if own is None else len(pictures)]))
    if most < 0:
        return False
    shapes = ranks.share([n for p in pictures for n in (len(p.choose()), p.degree)] + [0, 0] * (most - len(pictures)))
    gathered = PackedGradient()
    for index in range(most):
        if index < len(pictures):
            # Indices travel as the bits of a float32.
            picture = pictures[index]
            bits = picture.choose().to(torch.int32).view(torch.float32)[:, None]
            table = torch.cat([bits, picture.directions, picture.colors], dim=1)
        else:
            table = torch.zeros(0, 7, device=parameter.device)
        counts = [shape[2 * index] for shape in shapes]
        for shape, rows in zip(shapes, ranks.gather_rows(table, counts), strict=True):
            degree = shape[2 * index + 1]
            if degree:  # 0 for ranks with fewer pictures
                indices = rows[:, 0].contiguous().view(torch.int32).long()
                gathered.pictures.append(ColorGradient(indices, rows[:, 1:4], rows[:, 4:], degree))
    setattr(parameter, _ATTRIBUTE, gathered)
    parameter.grad = parameter.new_zeros(()).expand(parameter.shape)
    return True


def forget_gradient(parameter: Tensor) -> None:
    """Drops both gradients of a parameter."""
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
        # Nerfstudio steps an optimiser only if a gradient is set. This one takes a single number in memory.
        parameter.grad = parameter.new_zeros(()).expand(parameter.shape)


class _StoredHarmonics(torch.autograd.Function):
    """Σ_k Y_k(d) f_k for coefficients of any dtype; their gradient is packed and attached to the parameter."""

    @staticmethod
    def forward(ctx, directions: Tensor, storage: Tensor, degree: int) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(directions)
        ctx.storage, ctx.degree = storage, degree
        if kernel_device(directions) == "cuda" and (lacks_values(directions) or compat.has_gsplat_kernels()):
            return _evaluate_with_gsplat(directions, storage, degree)
        colors = torch.empty_like(directions)
        if fits_numba(storage):
            from f3rm_ext.splat.rasterize.sh_kernels import evaluate

            arrays = (tensor.numpy() for tensor in (directions.contiguous(), storage.detach(), colors))
            evaluate(degree, sh_rest_count(degree), *arrays)
            return colors
        for part in chunks(directions, _chunk(directions)):
            bases = sh_bases(degree, directions[part])
            colors[part] = torch.einsum("nk,nkc->nc", bases, _coefficients(storage, part, degree))
        return colors

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, None, None]:  # type: ignore[override]
        (directions,), storage = ctx.saved_tensors, ctx.storage
        if not ctx.needs_input_grad[0] and _takes_all(gradient):
            _gather(storage, ColorGradient(None, directions, gradient.contiguous(), ctx.degree))
            return None, None, None
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
        return by_direction, None, None


def _evaluate_with_gsplat(directions: Tensor, storage: Tensor, degree: int) -> Tensor:
    """Evaluates harmonics of degrees 1 and up by gsplat's kernel, which wants float32 and a coefficient of degree 0."""
    from f3rm_ext.splat.rasterize.gsplat_backend import kernels_for

    spherical_harmonics = kernels_for(directions).spherical_harmonics
    colors = torch.empty_like(directions)
    for part in chunks(directions, CHUNK_KERNEL):
        coefficients = functional.pad(_coefficients(storage, part, degree), (0, 0, 1, 0))
        colors[part] = spherical_harmonics(degree, directions[part], coefficients)
    return colors


def fits_numba(parameter: Tensor) -> bool:
    """Whether the kernels of :mod:`f3rm_ext.splat.rasterize.sh_kernels` can read a parameter."""
    return not lacks_values(parameter) and parameter.device.type == "cpu" and parameter.dtype == torch.float32


def _takes_all(gradient: Tensor) -> bool:
    """Whether the optimiser's step is a kernel, which takes gradients of all Gaussians."""
    if lacks_values(gradient):
        return kernel_device(gradient) == "cuda"
    return find_kernels(TRITON_KERNELS, gradient.device) is not None


def _chunk(on: Tensor) -> int:
    return CHUNK_CPU if on.device.type == "cpu" else CHUNK


def _coefficients(storage: Tensor, part: slice | Tensor, degree: int) -> Tensor:
    return storage.detach()[part, : sh_rest_count(degree)].float()


def packed_sh_colors(
    degree: int,
    directions: Float[Tensor, "gaussians 3"],
    features_dc: Float[Tensor, "gaussians 3"],
    features_rest: Float[Tensor, "gaussians coeffs 3"],
) -> Float[Tensor, "gaussians 3"]:
    """Evaluates colours like :func:`f3rm_ext.splat.rasterize.spherical_harmonics.sh_colors`, with little memory.

    Neither pass allocates a tensor of the size of the coefficients. The gradient of `features_rest` is packed and
    attached to it for :class:`f3rm_ext.splat.memory.adam.PackedAdam`. Its ``.grad`` is only a marker filled with zeros,
    so gradient clipping and gradient scalers have no effect.

    Args:
        degree: SH degree to evaluate, 0 to 3.
        directions: from the camera to the Gaussians, scene frame, any length.
        features_rest: the parameter itself, float32 or float16; must be a leaf.

    Raises:
        ConfigError: the degree needs more coefficients than there are.
        ValueError: `features_rest` is not a leaf, so its gradient would be lost.
    """
    if features_rest.requires_grad and not features_rest.is_leaf:
        raise ValueError("packed_sh_colors takes the parameter itself; for some of its rows use sh_colors.")
    require_degree(degree, features_rest)
    colors = SH_C0 * features_dc + 0.5
    if degree > 0:
        units = functional.normalize(directions, dim=-1)
        colors = colors + _StoredHarmonics.apply(units, features_rest, degree)  # type: ignore[operator]
    return colors.clamp(min=0.0)
