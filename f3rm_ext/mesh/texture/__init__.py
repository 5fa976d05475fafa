"""Textures of meshes: an atlas, colours from photos, and renderings to compare with photos."""
