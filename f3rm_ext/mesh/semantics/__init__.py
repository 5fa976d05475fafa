"""Features on meshes: lifted from photos, queried as fields and splats are, and parts cut out by their scores."""
