"""Compiled kernels for the CPU, built by the system's compiler on first use, for the machine at hand; never at import."""
