"""Meshes from trained scenes: extraction, files and comparison with the truth. A mesh is a ``trimesh.Trimesh``."""
