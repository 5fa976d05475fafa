"""A trained scene as files for other programs: point clouds with features. Knows models by protocol only."""
