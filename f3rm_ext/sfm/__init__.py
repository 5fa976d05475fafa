"""Cameras from photos: rays and the cameras behind them, measures of poses, and DiffusionSfM."""
