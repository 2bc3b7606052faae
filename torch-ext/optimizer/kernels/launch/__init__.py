"""How Triton's kernels are compiled, recorded and launched."""
