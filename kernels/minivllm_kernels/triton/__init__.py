"""The GPU path: every op as Triton kernels, one file an op. Importing this package does not import triton; its modules do.

``ops`` is the backend for CUDA devices. ``interpreted`` runs the same kernels on the CPU, in Triton's interpreter, which proves
them on a machine without a GPU and is far too slow for anything else. ``compilation`` compiles every configuration ahead of
time for the cards of docs/kernels.md and reports registers, spills and shared memory.
"""
