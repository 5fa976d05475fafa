"""Queries to a trained scene: by text, by example or by vectors; their scores, pictures and metrics."""
