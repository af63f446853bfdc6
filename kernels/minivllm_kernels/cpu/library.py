"""The compiled library behind ctypes: structures, signatures, and a check that both sides agree on them.

ctypes releases the GIL for the length of a call, so other Python threads run while a step is computed.
"""

import ctypes
from ctypes import POINTER, c_char_p, c_double, c_float, c_int, c_int32, c_size_t, c_void_p
from functools import cache
from pathlib import Path

from minivllm_kernels.cpu.build import ISAS, build_library, missing_features, wanted_isa
from minivllm_kernels.dispatch import KernelUnavailableError

__all__ = ["PANEL", "Batch", "Cache", "Draw", "Layer", "Matrix", "Model", "kernel_library", "open_library"]

PANEL = 32  # output channels that are packed together


class Matrix(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("kind", c_int32),
        ("channels", c_int32),
        ("depth", c_int32),
        ("pad", c_int32),
    ]


class Cache(ctypes.Structure):
    _fields_ = [("k", c_void_p), ("v", c_void_p), ("k_scale", c_void_p), ("v_scale", c_void_p)]


class Layer(ctypes.Structure):
    _fields_ = [
        ("qkv", Matrix),
        ("out", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
        ("input_norm", c_void_p),
        ("post_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("cache", Cache),
    ]


class Model(ctypes.Structure):
    _fields_ = [
        ("layers", POINTER(Layer)),
        ("embedding", Matrix),
        ("head", Matrix),
        ("final_norm", c_void_p),
        ("cos_sin", c_void_p),
        ("num_layers", c_int32),
        ("hidden", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("intermediate", c_int32),
        ("block_size", c_int32),
        ("cache_kind", c_int32),
        ("eps", c_float),
        ("threads", c_int32),
        ("block_rows", c_int32),
        ("pad", c_int32),
    ]


class Batch(ctypes.Structure):
    _fields_ = [
        ("sequences", c_int32),
        ("tokens", c_int32),
        ("sampled", c_int32),
        ("table_width", c_int32),
        ("token_ids", c_void_p),
        ("query_lens", c_void_p),
        ("seq_lens", c_void_p),
        ("tables", c_void_p),
        ("last_rows", c_void_p),
        ("logits", c_void_p),
        ("pooled_rows", c_void_p),
        ("pooled_states", c_void_p),
        ("pooled", c_int32),
        ("pad", c_int32),
    ]


class Draw(ctypes.Structure):
    _fields_ = [
        ("uniform", c_double),
        ("temperature", c_float),
        ("top_p", c_float),
        ("min_p", c_float),
        ("top_k", c_int32),
    ]


STRUCTURES = (Matrix, Cache, Layer, Model, Batch, Draw)


@cache
def kernel_library() -> ctypes.CDLL:
    """The library for this machine, built if need be, once a process.

    Raises:
        KernelUnavailableError: no compiler, the build failed, or this processor cannot run what ``MINIVLLM_CPU_ISA`` asks
            for; the message says which.
    """
    isa = wanted_isa()
    missing = missing_features(isa) if isa in ISAS else []
    if missing:  # running it would end the process
        raise KernelUnavailableError(f"MINIVLLM_CPU_ISA={isa!r} needs {', '.join(missing)}, which this processor lacks")
    return open_library(build_library(isa))


def open_library(path: Path) -> ctypes.CDLL:
    """Load a built library and declare its functions."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelUnavailableError(
            f"the compiled kernels at {path} do not load: {error}; delete the file to have it built again"
        ) from error
    library.minivllm_isa.restype = c_char_p
    library.minivllm_group.restype = c_int
    library.minivllm_sizes.argtypes, library.minivllm_sizes.restype = [c_int], c_int
    library.minivllm_decoder_new.argtypes, library.minivllm_decoder_new.restype = [POINTER(Model)], c_void_p
    library.minivllm_decoder_free.argtypes, library.minivllm_decoder_free.restype = [c_void_p], None
    library.minivllm_decoder_run.argtypes, library.minivllm_decoder_run.restype = [c_void_p, POINTER(Batch)], c_int
    library.minivllm_decoder_seconds.argtypes, library.minivllm_decoder_seconds.restype = [c_void_p, POINTER(c_double)], None
    library.minivllm_argmax.argtypes = [c_void_p, c_int, c_int, c_size_t, c_void_p, c_int]
    library.minivllm_argmax.restype = None
    library.minivllm_sample.argtypes = [c_void_p, c_int, c_int, c_size_t, POINTER(Draw), c_void_p, c_int]
    library.minivllm_sample.restype = None
    library.minivllm_linear.argtypes = [POINTER(Matrix), c_void_p, c_int, c_int, c_void_p, c_int, c_int]
    library.minivllm_linear.restype = None
    for index, structure in enumerate(STRUCTURES):
        theirs = library.minivllm_sizes(index)
        if theirs != ctypes.sizeof(structure):
            raise KernelUnavailableError(f"{structure.__name__} has {ctypes.sizeof(structure)} bytes here and {theirs} in {path}")
    return library
