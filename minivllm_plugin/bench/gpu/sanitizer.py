"""Part: compute-sanitizer's memcheck over the attention kernels, where the tool is installed: reads and writes out of bounds."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from minivllm_plugin.bench.gpu.attention_checks import check_attention
from minivllm_plugin.bench.gpu.kernels import backend_module
from minivllm_plugin.bench.gpu.records import Given, Recorder

__all__ = ["probe", "run"]

FOUND_SOMETHING = 99
ENDING_SECONDS = 5.0  # to say that time is up before this part is ended itself
USUAL_PLACE = Path("/usr/local/cuda/bin/compute-sanitizer")


def run(given: Given, record: Recorder) -> None:
    """One check, or a note that says why there is none."""
    tool = shutil.which("compute-sanitizer") or (str(USUAL_PLACE) if USUAL_PLACE.exists() else None)
    command = [sys.executable, "-m", "minivllm_plugin.bench.gpu.sanitizer"]
    if given.rehearse:
        probe()
        record.note("the probe ran; there is no device to sanitise")
        return
    if tool is None:
        record.note("compute-sanitizer is not installed")
        return
    # Without torch's cache every tensor is an allocation of its own, so that a read past its end is seen.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    wrapped = [tool, "--tool", "memcheck", "--error-exitcode", str(FOUND_SOMETHING), *command]
    try:
        done = subprocess.run(
            wrapped,
            capture_output=True,
            text=True,
            timeout=max(given.seconds - ENDING_SECONDS, 1.0),
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        record.note(f"compute-sanitizer was not done after {given.seconds:.0f} s")
        return
    lines = [line.lstrip("= ") for line in done.stdout.splitlines() if line.startswith("=========")]
    if done.returncode in (0, FOUND_SOMETHING):
        record.check("memcheck of the attention kernels", done.returncode == 0, "; ".join(lines[-3:])[:400])
    else:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        record.note(f"compute-sanitizer could not run here (exit {done.returncode}): {' '.join(said[-2:])[:300]}")


def probe() -> None:
    """What is run under the tool: small batches of both attention kernels."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    ours, reason = backend_module("triton.interpreted" if interpreted else "triton.ops")
    if ours is None:
        raise SystemExit(f"the Triton kernels cannot be used: {reason}")
    own = Recorder()
    check_attention(ours, "attention", Given(rehearse=interpreted), own, small=True)
    wrong = [found["name"] for found in own.records if not found["passed"]]
    if wrong:
        raise SystemExit(f"wrong results: {', '.join(wrong)}")


if __name__ == "__main__":
    probe()
