"""Captures: reading transforms.json or a COLMAP model, and checking it, its poses and its images."""

from f3rm_ext import compat

# Nerfstudio loads dataparsers before our other parts, so this runs before anything imports splatfacto and gsplat.
compat.tolerate_missing_gsplat()
