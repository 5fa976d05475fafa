"""Adam for rows with a gradient, with compact moments and parameters in half precision."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import tyro
from nerfstudio.engine.optimizers import OptimizerConfig
from torch import Tensor
from torch.nn import Parameter

from f3rm_ext.engine.random_state import step_seed
from f3rm_ext.engine.ranks import Ranks
from f3rm_ext.errors import ConfigError
from f3rm_ext.memory.shapes import lacks_values
from f3rm_ext.splat.gaussians import sh_rest_count
from f3rm_ext.splat.memory import remainder
from f3rm_ext.splat.memory.moments import FIRST, MOMENTS, SECOND, MomentStorage, detect_storage, resize_moments
from f3rm_ext.splat.memory.packed import (
    TRITON_KERNELS,
    PackedGradient,
    fits_numba,
    forget_gradient,
    gather_gradient,
    packed_gradient,
)
from f3rm_ext.splat.memory.rounding import to_half
from f3rm_ext.splat.triton_kernels import find_kernels

BETAS = (0.9, 0.999)
SEEN = "seen"
"""State entry: the step in which a row last had a gradient, int32."""
_CHUNK_CPU, _CHUNK = 1 << 11, 1 << 18
"""Rows updated at a time; bounds the unpacked gradients and fits the CPU's cache."""


class PackedAdam(torch.optim.Optimizer):
    """Adam that updates only the rows (Gaussians) with a gradient in this step.

    Rows without a gradient wait until they have one again. The update then catches up on the missed steps: moments
    decay, and the remaining momentum moves the row. The result equals plain Adam, unlike SelectiveAdam of gsplat 1.5,
    which does not catch up.

    All arithmetic is float32 on a few rows at a time; it is one Triton kernel on CUDA where that works, and one of
    numba on the CPU if nothing is stored in fewer bits. A float16 parameter is rounded stochastically, so updates below
    its resolution count on average. The random numbers of a step depend only on the seed and the step, so a resumed run
    gives the same result.

    Uses the gradients gathered by :func:`f3rm_ext.splat.memory.packed.packed_sh_colors` if there are any, else
    ``.grad``.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = BETAS,
        eps: float = 1e-15,
        moments: MomentStorage = "float32",
        seed: int = 0,
        reflective_above: float = 0.0,
    ) -> None:
        """Starts with zero moments.

        Args:
            params: parameters, (rows, ...), float32 or float16.
            reflective_above: view dependence of a colour above which the float16 coefficients of a Gaussian get a
                remainder; 0 for none. See :mod:`f3rm_ext.splat.memory.remainder`.
        """
        options = {"moments": moments, "seed": seed, "reflective_above": reflective_above}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, **options})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)
        return loss

    def _step(self, parameter: Parameter, group: dict[str, Any]) -> None:
        state, moments = self.state[parameter], MOMENTS[group["moments"]]
        if FIRST not in state:
            state.update({"step": 0, SEEN: _steps(parameter, 0), **moments.zeros(parameter)})
        state["step"] += 1
        half = parameter.dtype == torch.float16
        if half and group["reflective_above"] > 0 and state["step"] % remainder.REFRESH_EVERY == 1:
            reflective = remainder.view_dependence(parameter.data) > group["reflective_above"]
            remainder.choose(state, reflective, parameter.data)
        seed = step_seed(group["seed"], state["step"])
        packed = packed_gradient(parameter)
        if packed is not None and _step_with_kernel(parameter, state, group, seed, packed):
            return
        generator = torch.Generator(parameter.device).manual_seed(seed)
        chunk = _CHUNK_CPU if parameter.device.type == "cpu" else _CHUNK
        visible = None if packed is None else packed.rows()
        for start in range(0, len(parameter) if visible is None else len(visible), chunk):
            if packed is None or visible is None:
                rows: Tensor | slice = slice(start, start + chunk)
                gradient = parameter.grad[rows].float()  # type: ignore[index]
            else:
                rows = visible[start : start + chunk]
                gradient = packed.unpack(rows, start, parameter.shape[1])
            first, second = moments.read(state, rows)
            missed = state["step"] - 1 - state[SEEN][rows]
            state[SEEN][rows] = state["step"]
            # A dense gradient is of all rows, so none has missed a step.
            change = _catch_up(first, second, missed, group, state["step"]) if packed is not None else 0
            change += _adam(first, second, gradient, group, state["step"])
            moments.write(state, rows, first, second, generator)
            value = change.add_(parameter.data[rows])
            if remainder.SLOT in state:
                value += remainder.read(state, rows)
                parameter.data[rows] = remainder.write(state, rows, value, generator)
            else:
                parameter.data[rows] = to_half(value, generator) if half else value

    def gather_gradients(self, parameter: Parameter, ranks: Ranks) -> bool:
        """See :class:`f3rm_ext.engine.protocols.GathersGradients`."""
        return gather_gradient(parameter, ranks)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients, including packed ones."""
        for group in self.param_groups:
            for parameter in group["params"]:
                forget_gradient(parameter)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a state of this class, with any storage of moments, or of torch's Adam.

        Torch would convert every tensor of the state to the dtype of the parameter. Here, moments are converted only
        if their storage differs. For harmonics of another degree, moments are cut like the coefficients, and those of
        new coefficients start at zero.

        Raises:
            ValueError: the moments belong to a parameter of another shape.
        """
        keys = ("moments", "seed", "reflective_above")
        ours = [{key: group[key] for key in keys} for group in self.param_groups]
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        for group, own in zip(self.param_groups, ours, strict=True):
            group.update({**own, "seed": group.get("seed", own["seed"])})
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        params = [(item, group) for group in self.param_groups for item in group["params"]]
        for number, (parameter, group) in zip(numbers, params, strict=True):
            if number in state_dict["state"]:
                self.state[parameter] = _convert_state(state_dict["state"][number], parameter, group)


def _step_with_kernel(
    parameter: Parameter, state: dict[str, Any], group: dict[str, Any], seed: int, packed: PackedGradient
) -> bool:
    """Takes the step with a kernel if there is one for this device, storage and gradient."""
    if lacks_values(parameter):
        return True  # beside its moments, a step takes little: one kernel, or some thousand rows at a time
    kernels = find_kernels(TRITON_KERNELS, parameter.device)
    if kernels is not None:
        step_packed = kernels.step_packed
    elif fits_numba(parameter) and group["moments"] == "float32":
        step_packed = _step_on_cpu
    else:
        return False
    if remainder.SLOT in state or not parameter.is_contiguous():
        return False
    gradients = packed.expand(len(parameter))
    if gradients is None:
        return False
    step_packed(parameter, state, group, seed, *gradients)
    return True


def _step_on_cpu(
    parameter: Parameter,
    state: dict[str, Any],
    group: dict[str, Any],
    _seed: int,
    directions: Tensor,
    colors: Tensor,
    degree: int,
) -> None:
    """Takes the step with the numba kernel, which rounds nothing and so needs no seed."""
    from f3rm_ext.splat.rasterize.sh_kernels import update

    if not parameter.numel():
        return
    (beta1, beta2), step, rows = group["betas"], state["step"], len(parameter)
    value, first, second = (entry.view(rows, -1).numpy() for entry in (parameter.data, state[FIRST], state[SECOND]))
    update(
        value, first, second, state[SEEN].numpy(), directions.contiguous().numpy(), colors.contiguous().numpy(),
        degree, sh_rest_count(degree), step, -group["lr"] / (1 - beta1**step), (1 - beta2**step) ** 0.5, group["eps"],
        beta1, beta2,
    )  # fmt: skip


def _catch_up(first: Tensor, second: Tensor, missed: Tensor, group: dict[str, Any], step: int) -> Tensor:
    """Decays moments by the missed steps, in place, and returns the change from their momentum in these steps.

    Step j after the last update adds −lr m β₁ʲ / √(v β₂ʲ). With r = β₁ / √β₂, the sum over n steps is the geometric
    series −lr m / √v · r (1 − rⁿ) / (1 − r). The bias correction is that of the present step.
    """
    beta1, beta2 = group["betas"]
    ratio = beta1 / beta2**0.5
    count = missed.float().view(-1, *[1] * (first.dim() - 1))
    change = _direction(first, second, group, step)
    change *= (1 - ratio**count) * (ratio / (1 - ratio))
    first *= beta1**count
    second *= beta2**count
    return change


def _adam(first: Tensor, second: Tensor, gradient: Tensor, group: dict[str, Any], step: int) -> Tensor:
    """Updates the moments in place and returns the change of the parameter."""
    beta1, beta2 = group["betas"]
    first.lerp_(gradient, 1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    return _direction(first, second, group, step)


def _direction(first: Tensor, second: Tensor, group: dict[str, Any], step: int) -> Tensor:
    beta1, beta2 = group["betas"]
    root = second.sqrt().div_((1 - beta2**step) ** 0.5).add_(group["eps"])
    return (first / root).mul_(-group["lr"] / (1 - beta1**step))


def _steps(parameter: Tensor, step: int) -> Tensor:
    return torch.full((len(parameter),), step, dtype=torch.int32, device=parameter.device)


def _convert_state(saved: dict[str, Any], parameter: Parameter, group: dict[str, Any]) -> dict[str, Any]:
    device, step = parameter.device, int(saved["step"])
    kept = {name: value.to(device) for name, value in saved.items() if isinstance(value, Tensor) and name != "step"}
    kept = resize_moments(kept, parameter)
    if kept[FIRST].shape != parameter.shape:
        raise ValueError(f"moments of {tuple(kept[FIRST].shape)} for a parameter of {tuple(parameter.shape)}")
    state: dict[str, Any] = {"step": step, SEEN: kept[SEEN].clone() if SEEN in kept else _steps(parameter, step)}
    if group["reflective_above"] > 0 and remainder.SLOT in kept:
        state |= {name: kept[name].clone() for name in (remainder.SLOT, remainder.REMAINDER)}
    theirs, ours = MOMENTS[detect_storage(kept)], MOMENTS[group["moments"]]
    if theirs is ours:
        return state | {name: kept[name].clone() for name in ours.zeros(parameter[:0])}
    state |= ours.zeros(parameter)
    generator = torch.Generator(device).manual_seed(step_seed(group["seed"], 0))
    for start in range(0, len(parameter), _CHUNK):
        rows = slice(start, start + _CHUNK)
        ours.write(state, rows, *theirs.read(kept, rows), generator)
    return state


@dataclass
class PackedAdamOptimizerConfig(OptimizerConfig):
    """Adam that updates only visible Gaussians and can store compact moments."""

    _target: type = field(default_factory=lambda: PackedAdam)
    lr: float = 2.5e-3 / 20
    """Learning rate, > 0."""
    eps: float = 1e-15
    """Added to the root of the second moment."""
    seed: int = 0
    """Seed of the random numbers for rounding."""
    # The memory options of the model set these.
    moments: tyro.conf.Suppress[MomentStorage] = "float32"
    """Storage of the two moments: 8 bytes per number in float32, 4 in bfloat16, about 2 in int8."""
    reflective_above: tyro.conf.Suppress[float] = 0.0
    """View dependence of a colour above which a float16 parameter gets a remainder; 0 for none."""

    def setup(self, params: Any) -> torch.optim.Optimizer:
        """Creates the optimiser.

        Raises:
            ConfigError: gradient clipping is configured.
        """
        if self.max_norm is not None:
            raise ConfigError(
                "Gradients of spherical harmonics cannot be clipped by --optimizers.features-rest.optimizer.max-norm, "
                "as they are kept packed: leave it at None."
            )
        return super().setup(params)
