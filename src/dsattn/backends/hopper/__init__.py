"""Our kernels for Hopper GPUs (compute capability 9.0), in Gluon, the layer of Triton that names warps and layouts."""
