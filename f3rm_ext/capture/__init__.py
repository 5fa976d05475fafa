"""Captures: reading transforms.json, and checking it, its poses and its images."""

from f3rm_ext import compat

# Nerfstudio's dataparsers are loaded first of all our parts, before anything has reached splatfacto and its gsplat.
compat.tolerate_missing_gsplat()
