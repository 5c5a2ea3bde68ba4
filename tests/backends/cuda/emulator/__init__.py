"""Runs our CUDA C++ kernels without a GPU, for tests: `kernel.py` says what it does with them, `machine.cpp` how.

A kernel is compiled to PTX by NVRTC, translated to C++ and compiled by g++. It shows wrong results, accesses outside of
tensors and of shared memory, missing barriers and waits, and deadlocks. It shows nothing of speed, and what a thread
stores is seen by all others at once, in order.
"""
