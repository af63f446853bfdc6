"""What the card can do at most, measured: bytes a second and multiply-adds a second. Everything else is held against these."""

import torch

from minivllm_plugin.bench.gpu.records import Given, Recorder
from minivllm_plugin.bench.gpu.timing import seconds_on

__all__ = ["BANDWIDTH", "MATRIX_RATE", "bandwidth_of", "matrix_rate_of", "measure_floors"]

COPY, READ, BANDWIDTH, MATRIX_RATE = "copy_bytes_per_s", "read_bytes_per_s", "bandwidth_bytes_per_s", "matrix_flops"


def measure_floors(given: Given, record: Recorder) -> None:
    """Copy, read-only and matrix rates, as figures and as facts for the parts that follow."""
    device = given.device
    size = 1 << (16 if given.rehearse else 31)  # bytes: far more than any cache holds
    source = torch.zeros(size // 4, device=device)
    target = torch.empty_like(source)
    copied = 2 * size / seconds_on(device, lambda: target.copy_(source))
    read = size / seconds_on(device, lambda: source.sum())
    side = 64 if given.rehearse else 8192
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))  # zeros would draw less power
    rate = 2 * side**3 / seconds_on(device, lambda: a @ b)
    record.figure("copy, device to device (bytes read and written)", copied / 1e9, "GB/s")
    record.figure("read-only kernel (sum of float32)", read / 1e9, "GB/s")
    record.figure(f"bfloat16 matrix product, {side} cubed, random values", rate / 1e12, "TFLOP/s")
    for name, value in ((COPY, copied), (READ, read), (BANDWIDTH, max(copied, read)), (MATRIX_RATE, rate)):
        record.fact(name, value)


def bandwidth_of(given: Given) -> float:
    """Bytes a second: the better of copying and reading. Measured now if the part that does so did not get that far."""
    return _known(given, BANDWIDTH)


def matrix_rate_of(given: Given) -> float:
    """FLOP a second of a large bfloat16 product."""
    return _known(given, MATRIX_RATE)


def _known(given: Given, name: str) -> float:
    if name in given.known:
        return float(given.known[name])
    own = Recorder()
    measure_floors(given, own)
    return float(next(found["value"] for found in own.records if found["kind"] == "fact" and found["name"] == name))
