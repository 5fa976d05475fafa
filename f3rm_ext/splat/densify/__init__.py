"""Densification: growth and pruning of Gaussians."""

from f3rm_ext.splat.densify.base import Densifier
from f3rm_ext.splat.densify.free_space import FreeSpace
from f3rm_ext.splat.densify.ops import Change, RunOptimizers, apply
from f3rm_ext.splat.densify.options import DensifyOptions

__all__ = ["Change", "Densifier", "DensifyOptions", "FreeSpace", "RunOptimizers", "apply", "make_densifier"]


def make_densifier(
    options: DensifyOptions, scene_scale: float, last_step: int | None = None, sharded: bool = False
) -> Densifier:
    """Creates the strategy that the options select; see :class:`Densifier`."""
    if options.strategy == "default":
        from f3rm_ext.splat.densify.default import DefaultDensifier

        return DefaultDensifier(options, scene_scale, last_step, sharded)
    if options.strategy == "mcmc":
        from f3rm_ext.splat.densify.mcmc import MCMCDensifier

        return MCMCDensifier(options, last_step, sharded)
    return Densifier(options, last_step, sharded)
