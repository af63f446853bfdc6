"""``minivllm env``: what this machine and this installation are, for a person or a bug report."""

import json
import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

__all__ = ["env"]

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface-hub",
    "gguf",
    "litellm",
    "gradio",
    "triton",
    "flash-attn",
)
VARIABLES = ("MINIVLLM_", "HF_HUB_OFFLINE", "HF_HOME", "OMP_NUM_THREADS", "LITELLM_LOCAL_MODEL_COST_MAP", "CUDA_VISIBLE_DEVICES")

Section = dict[str, str]


def env(as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False) -> None:
    """Show versions, devices, kernels picked (and why), cache and LiteLLM state."""
    sections: dict[str, Section] = {"versions": _versions(), "machine": _machine()}
    for device in _devices(sections["machine"]):
        sections[f"kernels on {device}"] = _kernels(device)
    sections["cache"] = _cache()
    sections["litellm"] = _litellm()
    sections["settings"] = {name: os.environ[name] for name in sorted(os.environ) if name.startswith(VARIABLES)}
    if as_json:
        print(json.dumps(sections, indent=2))
        return
    for title, section in sections.items():
        print(title)
        width = max((len(name) for name in section), default=0)
        for name, value in section.items():
            print(f"  {name:<{width}}  {value}")
        if not section:
            print("  (none)")


def _versions() -> Section:
    found = {"minivllm-plugin": version("minivllm-plugin"), "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _machine() -> Section:
    import torch

    from minivllm_plugin.bench.machine import describe_machine

    found = describe_machine()
    memory = found["memory_bytes"]
    machine = {
        "system": found["system"],
        "cpu": found["cpu"],
        "cpu flags": " ".join(found["cpu_features"]) or "unknown",
        "torch cpu capability": torch.backends.cpu.get_cpu_capability(),
        "cores usable": str(found["cores"]),
        "torch threads": str(torch.get_num_threads()),
        "memory": f"{memory / 2**30:.0f} GiB" if memory else "unknown",
    }
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        machine[f"cuda:{index}"] = (
            f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, sm_{properties.major}{properties.minor}"
        )
    return machine


def _devices(machine: Section) -> list[str]:
    return ["cpu", *(["cuda"] if any(name.startswith("cuda:") for name in machine) else [])]


def _kernels(device: str) -> Section:
    import minivllm_kernels
    from minivllm_kernels.dispatch import KernelUnavailableError
    from minivllm_kernels.dispatch import why_not as backend_why_not

    try:
        choices = minivllm_kernels.explain(device)
    except KernelUnavailableError as error:
        return {"error": str(error)}
    rows: Section = {}
    if device == "cpu":
        missing = backend_why_not("cpu", device)
        rows["whole steps of Llama, Qwen2, Qwen3"] = (
            f"reference  (not cpu: {missing})" if missing else f"cpu, compiled ({_isa()})"
        )
    for choice in choices:
        why_not = "; ".join(f"not {name}: {reason}" for name, reason in choice.passed_over)
        rows[choice.op] = choice.backend + (f"  ({why_not})" if why_not else "")
    return rows


def _isa() -> str:
    from minivllm_kernels.cpu.library import kernel_library

    return str(kernel_library().minivllm_isa().decode())


def _cache() -> Section:
    from minivllm_plugin.models.pull import cache_directory

    directory = cache_directory()
    if not directory.is_dir():
        return {"directory": f"{directory} (not made yet)"}
    used = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    return {
        "directory": str(directory),
        "used": f"{used / 1e6:,.0f} MB",
        "free": f"{shutil.disk_usage(directory).free / 1e9:,.1f} GB",
    }


def _litellm() -> Section:
    import importlib

    try:
        state = str(importlib.import_module("minivllm_adapters.autoload").status().explain())
    except ImportError as error:
        state = f"unavailable ({error})"
    return {"autoload": state, "in a program": "minivllm_plugin.register(), then model='minivllm/<name>'"}
