"""``minivllm serve`` with scripted engines, for the tests of this folder: run as a program, with the command's own arguments.

Everything is real but the model: command line, configuration, LiteLLM's proxy, provider, engine thread, scheduler, pool, streams.
A token is one byte of text. The last user message decides the answer: see ``ANSWERS`` and ``Script``.
"""

import math
import sys
import time
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

import minivllm_plugin.registry
from minivllm_plugin.cli import main
from minivllm_plugin.engine.sequence import Sequence
from minivllm_plugin.serving.llm import LLM
from minivllm_plugin.serving.tokenizer import Tokenizer
from minivllm_plugin.serving.tokenizer_files import TokenizerSettings
from minivllm_plugin.testing import LedgerRunner, scripted_llm

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
END = 256
DEFAULT = "The capital of France is Paris 🌶."
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ANSWERS = {
    "Call a tool": CALL,
    "Call two tools": CALL + "\n" + CALL.replace("Paris", "Rome"),
    "Think first": "<think>France, so</think>Paris",
}
STEP_SECONDS = 0.005  # of an answer without end, so that a test can leave in its middle
DIMENSIONS = 8


def tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return Tokenizer(backend, TokenizerSettings(named_tokens={"eos_token": "<end>"}, chat_templates={"default": TEMPLATE}))


class Script:
    """Chooses the next token. ``Go on for ever`` has no end, ``Fail`` ends the engine."""

    def __init__(self) -> None:
        self._tokenizer = tokenizer()

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
        tokenizer=tokenizer(),
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
