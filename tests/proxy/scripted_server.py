"""``minivllm serve`` with scripted engines, for the tests of this folder: run as a program, with the command's own arguments.

Everything is real but the model: command line, configuration, LiteLLM's proxy, provider, engine thread, scheduler, pool, streams.
A token is one byte of text. The last user message decides the answer: see ``ANSWERS`` and ``Script``.
"""

import math
import sys
import time
from typing import Any

from byte_tokenizer import END, byte_tokenizer

import minivllm_plugin.registry
from minivllm_plugin.cli import main
from minivllm_plugin.engine.sequence import Sequence
from minivllm_plugin.serving.llm import LLM
from minivllm_plugin.testing import LedgerRunner, scripted_llm

DEFAULT = "The capital of France is Paris 🌶."
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ANSWERS = {
    "Call a tool": CALL,
    "Call two tools": CALL + "\n" + CALL.replace("Paris", "Rome"),
    "Think first": "<think>France, so</think>Paris",
}
STEP_SECONDS = 0.005  # of an answer without end, so that a test can leave in its middle
DIMENSIONS = 8


class Script:
    """Chooses the next token. ``Go on for ever`` has no end, ``Fail`` ends the engine."""

    def __init__(self) -> None:
        self._tokenizer = byte_tokenizer()

    def __call__(self, seq: Sequence) -> int:
        prompt = self._tokenizer.decode(seq.token_ids[: seq.num_prompt_tokens])
        if "Go on for ever" in prompt:
            time.sleep(STEP_SECONDS)
            return self._tokenizer.encode("a")[0]
        if "Fail" in prompt:
            raise RuntimeError("the model failed on purpose")
        asked = prompt.rpartition("user: ")[2]
        text = next((text for question, text in ANSWERS.items() if question in asked), DEFAULT)
        ids = [*self._tokenizer.encode(text), END]
        return ids[min(seq.num_completion_tokens, len(ids) - 1)]


class Runner(LedgerRunner):
    """Gives embeddings, too: the share of each remainder of the token ids."""

    can_pool = True

    def run(self, seqs: list[Sequence], is_prefill: bool) -> list[int]:
        tokens = super().run(seqs, is_prefill)
        for seq in seqs:
            if seq.pooling is not None and seq.num_computed_tokens + seq.num_scheduled_tokens == seq.num_tokens:
                counts = [sum(token % DIMENSIONS == rest for token in seq.token_ids) for rest in range(DIMENSIONS)]
                length = math.sqrt(sum(count * count for count in counts))
                seq.embedding = [count / length for count in counts]
        return tokens


def make(model: str, **options: Any) -> LLM:
    """In place of :class:`LLM`: the registry makes engines with it, again when one has died."""
    if model == "narrow":
        options |= {"max_num_sequences": 1, "max_queue_size": 0}
    options |= {"tool_call_parser": "hermes", "reasoning_parser": "think"}
    llm, _ = scripted_llm(
        num_blocks=2048,
        block_size=16,
        tokenizer=byte_tokenizer(),
        vocab_size=257,
        eos=END,
        choose=Script(),
        runner=Runner,
        options=options,
    )
    return llm


if __name__ == "__main__":
    minivllm_plugin.registry.LLM = make  # type: ignore[assignment, misc]
    main(["serve", *sys.argv[1:]])
