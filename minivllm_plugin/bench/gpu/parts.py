"""What is done, in which order, and for how long at most; and the process that does one part of it.

    python -m minivllm_plugin.bench.gpu.parts PART RECORDS GIVEN

runs one part here, with its records in the file RECORDS and GIVEN as JSON: the command starts it.
"""

import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from minivllm_plugin.bench.gpu.records import Given, Recorder

__all__ = ["PARTS", "Part", "main"]

REFERENCE = {"MINIVLLM_KERNELS": "reference"}
INTERPRETER = {"MINIVLLM_KERNELS": "interpreter,reference", "TRITON_INTERPRET": "1"}


@dataclass(frozen=True, slots=True)
class Part:
    """One part.

    Attributes:
        name: also the module of this package that does it, whose ``run(given, record)`` is called.
        seconds: it may take at most.
        least: with less time left it is not begun.
        must_end: the whole check has failed if this part does not come to its end.
        rehearsed_with: environment of its process in a rehearsal.
    """

    name: str
    title: str
    seconds: float
    least: float = 10.0
    must_end: bool = False
    rehearsed_with: Mapping[str, str] = field(default_factory=lambda: REFERENCE)


# What must be right comes first, then what was asked for in numbers, then what is good to know.
PARTS: Sequence[Part] = (
    Part("environment", "machine and floors", 60, must_end=True),
    Part("kernels", "kernels = reference", 150, must_end=True, rehearsed_with=INTERPRETER),
    Part("generations", "graphs = eager, overlapped = not", 120, must_end=True),
    Part("workload", "nano-vllm's work load", 110, least=25),
    Part("decode", "decode steps", 90),
    Part("prefill", "prefill", 45),
    Part("startup", "start", 90, least=30),
    Part("sanitizer", "compute-sanitizer", 70, least=20, rehearsed_with=INTERPRETER),
    Part("peer", "transformers", 80, least=30),
)


def main(arguments: Sequence[str]) -> int:
    """The process of one part."""
    name, path, given = arguments
    module = importlib.import_module(f"minivllm_plugin.bench.gpu.{name}")
    told = Given(**json.loads(given))
    with Path(path).open("a", encoding="utf-8") as file:
        module.run(told, Recorder(file, rehearse=told.rehearse))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
