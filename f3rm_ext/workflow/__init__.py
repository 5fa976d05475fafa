"""The chain from photos to a textured mesh: stages, their manifest, and the report of all of them."""
