"""Our CUDA C++ kernels without a GPU: their PTX as C++ (`translate.py`) on a machine of fibers (`machine.cpp`).

What it shows: results, reads and writes outside of tensors and shared memory, misaligned ones, deadlocks, and what goes
wrong in another order of threads and copies, which a seed chooses. What it does not: time, and what a GPU's memory may
reorder or a proxy not see without a fence.
"""
