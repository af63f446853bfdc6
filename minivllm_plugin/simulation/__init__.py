"""The engine without a model, under a virtual clock: would this policy, this pool, this router help with that load?

:func:`simulate` runs the real Scheduler and BlockManager over a trace of arrivals and lengths; only the time of a step is
modelled. Tokens are synthetic and no weights are loaded. Pure Python; numpy only to fit a cost model. docs/simulation.md.
"""

from minivllm_plugin.simulation.cost_model import CostModel, StepRecord, StepWork
from minivllm_plugin.simulation.generator import Lengths, generate_trace
from minivllm_plugin.simulation.result import SimulationResult
from minivllm_plugin.simulation.run import compare, simulate
from minivllm_plugin.simulation.trace import Trace, TraceRequest
from minivllm_plugin.simulation.trace_files import read_trace, write_trace

__all__ = [
    "CostModel",
    "Lengths",
    "SimulationResult",
    "StepRecord",
    "StepWork",
    "Trace",
    "TraceRequest",
    "compare",
    "generate_trace",
    "read_trace",
    "simulate",
    "write_trace",
]
