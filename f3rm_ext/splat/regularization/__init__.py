"""Losses that pull Gaussians to the surfaces they depict: pure maths on tensors, independent of any trainer.

They follow SuGaR (Guédon and Lepetit 2024), 2D Gaussian splatting (Huang et al. 2024) for normals from depth, and PGSR
(Chen et al. 2024) for depth of planes and its consistency between views.
"""

from f3rm_ext.splat.regularization.options import RegularizationOptions
from f3rm_ext.splat.regularization.planar import PlanarRegularizer
from f3rm_ext.splat.regularization.regularizer import Regularizer, TrainingView

__all__ = ["Regularizer", "TrainingView", "make_regularizer"]


def make_regularizer(options: RegularizationOptions) -> Regularizer:
    """Creates the regularisation that the options select."""
    return PlanarRegularizer(options) if options.mode == "planar" else Regularizer(options)
