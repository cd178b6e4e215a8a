"""Triton kernels: tensors in, tensors out. They know nothing of benchmarking."""
