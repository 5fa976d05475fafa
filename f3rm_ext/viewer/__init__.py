"""Asking questions in nerfstudio's viewer: the panel, and the outputs it adds to what a model renders."""
