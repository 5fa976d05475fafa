"""A GPU that is pretended: tensors that say they are on CUDA, gsplat's kernels, a count of what a real one would do."""
