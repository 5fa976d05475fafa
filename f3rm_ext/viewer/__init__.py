"""Queries in nerfstudio's viewer: the panel, and the outputs it adds to those of a model."""
