"""This project's engine on a job of ``benchmarks/peers.py``. ``--format``: int8, int4, bfloat16 or float32."""

import argparse
import json
from collections.abc import Sequence
from typing import Any

from protocol import contest

from minivllm_plugin import LLM, SamplingParams

MODES: dict[str, dict[str, Any]] = {
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
}


class Minivllm:
    """Settings are the defaults but for the window, which every contestant gets, and what ``--option`` says."""

    def __init__(self, options: argparse.Namespace, job: dict[str, Any]) -> None:
        self._llm = LLM(
            options.model,
            load_format="dummy" if options.dummy else "auto",
            max_model_len=job["max_model_len"],
            num_threads=job["threads"],
            **MODES[options.format],
            **dict(map(_setting, options.option)),
        )

    def generate(self, prompts: Sequence[Sequence[int]], outputs: Sequence[int], name: str) -> int:
        # A salt per case: nothing is found in the prefix cache but what the case itself remembers.
        salted = [{"prompt_token_ids": list(prompt), "cache_salt": name} for prompt in prompts]
        params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in outputs]
        done = self._llm.generate(salted, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in done)

    def remember(self, prefix: Sequence[int], name: str) -> None:
        self.generate([prefix], [1], name)


def _setting(text: str) -> tuple[str, Any]:
    """``KEY=VALUE``; a value that reads as JSON (``true``, ``4``, ``null``) is that, any other is a string."""
    key, _, value = text.partition("=")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


if __name__ == "__main__":
    contest(Minivllm, ("minivllm-plugin", "torch"))
