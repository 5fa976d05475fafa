"""Gaussians bound to the triangles of a mesh: where they lie, how they follow it, and the model that refines both."""
