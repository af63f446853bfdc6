"""OpenVINO GenAI's continuous batching on a job of ``benchmarks/peers.py``, from a GGUF file. Runs in its own environment."""

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from protocol import contest

CACHE_GIGABYTES = 2
LOOKUP = "prompt_lookup="
NGRAM = 3  # longest run of tokens that is looked up


class OpenVino:
    """With ``--option prompt_lookup=N`` it guesses up to N tokens from the text so far, which it does not by itself."""

    def __init__(self, options: argparse.Namespace, job: dict[str, Any]) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_batched_tokens, scheduler.max_num_seqs = CACHE_GIGABYTES, 512, 64
        scheduler.enable_prefix_caching = job["prefix_caching"]
        self._lookup = next((int(text.removeprefix(LOOKUP)) for text in options.option if text.startswith(LOOKUP)), 0)
        properties = {"prompt_lookup": True} if self._lookup else {}
        self._pipeline = genai.ContinuousBatchingPipeline(
            options.model, scheduler, "CPU", properties
        )  # takes all cores by itself

    def generate(self, prompts: Sequence[Sequence[int]], outputs: Sequence[int], name: str) -> int:
        tensors = [ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        done = self._pipeline.generate(tensors, [self._exactly(length) for length in outputs])
        return sum(len(result.m_generation_ids[0]) for result in done)

    def remember(self, prefix: Sequence[int], name: str) -> None:
        self.generate([prefix], [1], name)

    def _exactly(self, length: int) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = length, True, False
        if self._lookup:
            config.num_assistant_tokens, config.max_ngram_size = self._lookup, NGRAM
        return config


if __name__ == "__main__":
    contest(OpenVino, ("openvino-genai", "openvino"))
