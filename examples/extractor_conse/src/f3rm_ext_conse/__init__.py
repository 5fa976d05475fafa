"""An extractor for f3rm-ext: convex combinations of semantic embeddings."""
