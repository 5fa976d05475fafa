"""f3rm_ext: feature fields for Nerfstudio."""

__version__ = "0.1.0"

__all__ = ["__version__"]
