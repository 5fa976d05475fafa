"""What the memory of a training run is made of: tensors by category, peaks by phase, what to conclude from them."""
