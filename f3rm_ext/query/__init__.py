"""Asking a feature field where things are. Knows features and vectors, not how they were trained."""
