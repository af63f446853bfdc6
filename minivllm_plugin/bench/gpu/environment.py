"""Part: the card, the driver, versions, and which backend runs which op and why others do not; then the floors."""

import importlib.metadata
import shutil
import subprocess
from dataclasses import replace

import torch

import minivllm_kernels
from minivllm_kernels import AttentionGeometry
from minivllm_plugin.bench.gpu.floors import measure_floors
from minivllm_plugin.bench.gpu.records import Given, Recorder

__all__ = ["run"]

PACKAGES = ("torch", "triton", "flash-attn", "flash-attn-3", "transformers")
QWEN3 = AttentionGeometry(16, 8, 128, 16, torch.bfloat16, torch.bfloat16)


def run(given: Given, record: Recorder) -> None:
    """Facts, then figures."""
    _card(given, record)
    for name in PACKAGES:
        record.fact(name, _version(name))
    record.fact(
        "C compiler, which triton needs once a machine", bool(shutil.which("gcc") or shutil.which("clang") or shutil.which("cc"))
    )
    for size in (16, 256):
        for choice in minivllm_kernels.explain(given.device, replace(QWEN3, block_size=size)):
            if size == 16 or choice.op == "attention":
                reasons = "; ".join(f"not {name}: {reason}" for name, reason in choice.passed_over)
                title = choice.op if size == 16 else f"{choice.op}, blocks of {size}"
                record.fact(f"runs {title}", f"{choice.backend}  ({reasons})" if reasons else choice.backend)
    measure_floors(given, record)


def _card(given: Given, record: Recorder) -> None:
    if given.rehearse:
        record.fact("device", "cpu (rehearsal)")
        return
    properties = torch.cuda.get_device_properties(0)
    record.fact("device", properties.name)
    record.fact("compute capability", f"{properties.major}.{properties.minor}")
    record.fact("multiprocessors", properties.multi_processor_count)
    record.fact("memory_bytes", properties.total_memory)
    record.fact("CUDA of torch", torch.version.cuda)
    command = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem,power.limit", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        record.fact("driver, clocks, power limit", done.stdout.splitlines()[0].strip())
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        record.note(f"nvidia-smi says nothing ({type(error).__name__})")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
