"""Part: every kernel of ours, and flash-attn where it is installed, against the reference on the device's own tensors."""

import importlib
from typing import Any

from minivllm_plugin.bench.gpu.attention_checks import check_attention
from minivllm_plugin.bench.gpu.pointwise_checks import check_choices, check_pointwise
from minivllm_plugin.bench.gpu.records import Given, Recorder

__all__ = ["backend_module", "run"]


def run(given: Given, record: Recorder) -> None:
    """Checks. In a rehearsal the same kernels are interpreted, which says nothing about races or speed."""
    ours, reason = backend_module("triton.interpreted" if given.rehearse else "triton.ops")
    record.check("the Triton kernels can be used", ours is not None, reason)
    if ours is not None:
        check_pointwise(ours, given, record)
        check_attention(ours, "attention", given, record)
        check_choices(ours, given, record)
    flash, reason = (None, "a CPU has none") if given.rehearse else backend_module("flash")
    if flash is None:
        record.note(f"flash-attn does not take part: {reason}")
    else:
        check_attention(flash, "flash-attn", given, record)


def backend_module(name: str) -> tuple[Any, str]:
    """A backend of ours, or None and why it cannot be used here."""
    try:
        module = importlib.import_module(f"minivllm_kernels.{name}")
    except Exception as error:  # triton is not installed, or for another machine
        return None, f"it does not import ({type(error).__name__}: {error!s:.200})"
    reason = module.unavailable()
    return (None, reason) if reason else (module, "")
