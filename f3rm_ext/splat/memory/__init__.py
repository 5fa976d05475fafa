"""Gaussians in less memory: half-stored harmonics, packed gradients, small moments, and the sums of it all."""
