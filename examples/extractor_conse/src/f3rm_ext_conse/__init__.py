"""Convex combination of semantic embeddings as an extractor of f3rm-ext."""
