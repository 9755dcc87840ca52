"""Our kernels in Triton: one file an operation, for any GPU that Triton compiles for."""
