"""DiffusionSfM: ray maps of a few images by a diffusion transformer (Zhao et al. 2025, arXiv 2505.05473)."""
