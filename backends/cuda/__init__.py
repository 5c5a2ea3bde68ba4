"""Backends over NVIDIA's kernel libraries, and kernels of our own where Triton cannot reach the hardware."""
