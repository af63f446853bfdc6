"""Part: from nothing to the first token, in fresh processes: with an empty cache of compiled kernels, with a full one, and with
all graphs recorded first."""

import os
import tempfile
from typing import Any

from minivllm_plugin.bench.gpu.engines import model_to_measure
from minivllm_plugin.bench.gpu.records import Given, Recorder
from minivllm_plugin.bench.startup import measure_startup

__all__ = ["run"]

GOAL_SECONDS, GOAL_CARD = 10.0, "H200"


def run(given: Given, record: Recorder) -> None:
    """Figures in seconds. Making the random weights is a part of it, as reading a file would be."""
    options: dict[str, Any] = {"load_format": "dummy", "device": given.device, "dtype": "bfloat16", "max_model_len": 4096}
    if given.rehearse:
        options |= {"max_model_len": 128, "num_blocks": 20}
    with model_to_measure(given) as model, tempfile.TemporaryDirectory() as directory:
        os.environ["TRITON_CACHE_DIR"] = directory  # of the processes that are started: this one launches nothing
        cold, warm = measure_startup(model, options, repeat=1).runs
        goal = GOAL_SECONDS if GOAL_CARD in str(given.known.get("device", "")) else None
        record.figure("start to first token, graphs as they are met", _seconds(warm), "s", goal, "at most")
        record.figure("the same, kernels to be compiled first", _seconds(cold), "s")
        if not given.rehearse:
            full = measure_startup(model, {**options, "cuda_graphs": "full", "max_num_sequences": 256}, repeat=1).runs[-1]
            record.figure("the same, all graphs up to 256 requests recorded first", _seconds(full), "s")


def _seconds(start: Any) -> float:
    moments = start["moments"]
    return float(moments["first_token"] - moments["spawned"])
