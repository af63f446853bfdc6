"""The page in a process of its own, for ``page_costs.py`` to look at: says what it is served at and what CPU time it has used.

    python benchmarks/scripted_page.py --num-blocks 1000

Everything but the model is real. The one that stands in sleeps for a step's time and answers every sequence with the same letter,
so that what this process uses is the page and the engine. Prints ``READY`` and the address. Sent ``CPU``, it answers with the
seconds used so far; sent ``BUSY``, it has six sequences decode from then on. Ends with its input.
"""

import argparse
import contextlib
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minivllm_plugin import registry
from minivllm_plugin.errors import MinivllmError
from minivllm_plugin.testing import scripted_llm

BLOCK_SIZE = 16
VOCABULARY = 257  # bytes, and the end
NUM_BUSY, BUSY_TOKENS = 6, 200
NUM_FILLING = 10  # requests that leave nine tenths of the pool reusable


class PacedRunner:
    """Every step takes the same time, in which Python may do other things."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    @classmethod
    def for_scheduler(cls, scheduler: object, *, vocab_size: int, seconds: float) -> "PacedRunner":
        return cls(seconds)

    def run(self, seqs: Sequence[object], is_prefill: bool) -> list[int]:
        time.sleep(self.seconds)
        return [ord("a")] * len(seqs)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-blocks", type=int, default=1000)
    parser.add_argument("--step-ms", type=float, default=14.0, help="what a step takes")
    parser.add_argument("--fill", action="store_true", help="leave most of the pool reusable before anybody looks")
    parser.add_argument("--model", help="a real model instead; --step-ms and --fill are then not used")
    options = parser.parse_args(arguments)
    from minivllm_ui.app import PageServer, PageSettings

    if options.model is None:
        registry.LLM = _maker(options.step_ms / 1000)  # type: ignore[misc, assignment]
    name = options.model or "scripted"
    server = PageServer(PageSettings(model=name, port=0, options={"num_blocks": options.num_blocks}))
    if options.fill and options.model is None:
        _fill(registry.get_llm(name), options.num_blocks)
    server.start()
    print("READY", server.url, flush=True)
    for line in sys.stdin:
        if line.strip() == "BUSY":
            threading.Thread(target=_keep_busy, args=(registry.get_llm(name),), daemon=True).start()
        print(line.strip(), time.process_time(), flush=True)
    server.close()


def _maker(seconds: float) -> Any:
    sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))
    from byte_tokenizer import END, byte_tokenizer

    def make(model: str, **options: Any) -> Any:
        return scripted_llm(
            num_blocks=options.pop("num_blocks"),
            block_size=BLOCK_SIZE,
            vocab_size=VOCABULARY,
            eos=END,
            tokenizer=byte_tokenizer(),
            runner=PacedRunner,  # type: ignore[arg-type]
            options=options,
            seconds=seconds,
        )[0]

    return make


def _keep_busy(llm: Any) -> None:
    """One batch after another, every one the same, so that two windows of a few seconds can be compared."""
    from minivllm_plugin import SamplingParams

    params = SamplingParams(max_tokens=BUSY_TOKENS, ignore_eos=True)
    with contextlib.suppress(MinivllmError):  # the engine is closed
        while True:
            llm.generate([[ord("a") + index] * BUSY_TOKENS for index in range(NUM_BUSY)], params, use_tqdm=False)


def _fill(llm: Any, num_blocks: int) -> None:
    from minivllm_plugin import SamplingParams

    length = num_blocks * BLOCK_SIZE * 9 // 10 // NUM_FILLING
    llm.generate([[ord("A") + index] * length for index in range(NUM_FILLING)], SamplingParams(max_tokens=1), use_tqdm=False)


if __name__ == "__main__":
    main()
