"""Depth of photos and dense points by plane-sweep stereo."""

from typing import Literal

DenseMode = Literal["auto", "always", "never"]
"""Whether dense points join those of the capture: to fill them up, always, or never."""
