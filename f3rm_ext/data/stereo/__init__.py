"""Depth of photos and dense points by plane-sweep stereo."""

from typing import Literal

DenseMode = Literal["auto", "always", "never"]
"""Whether dense points are sought: where the capture has too few of its own, always, or never."""
