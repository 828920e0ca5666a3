"""Triton kernels, one file a kernel, each imported by its operator at the first CUDA call."""
