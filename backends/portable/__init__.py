"""Triton kernels for both vendors: every op of the contract, from one source."""
