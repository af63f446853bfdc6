"""A live engine behind the provider: real thread, scheduler, pool, streams and tokenizer; only the model is made up.

A token is one byte of text, so the counts are plain to see. The model either says one answer, or has logits that follow from
the tokens before (then the engine's own sampler chooses, and every sampling parameter has its effect).
"""

import gc
from typing import Any

from byte_tokenizer import END, byte_tokenizer

from minivllm_plugin import LLM
from minivllm_plugin.testing import LedgerRunner, LogitsRunner, scripted_llm

__all__ = ["ANSWER", "END", "Live"]

ANSWER = "The capital of France is Paris 🌶."


class Live:
    """Engines made on demand by one recipe, as the registry makes them: a dead one is replaced.

    Attributes:
        answer: what the model says.
        has_logits: it has hashed logits instead, below the engine's sampler.
    """

    def __init__(self) -> None:
        self.options: dict[str, Any] = {"num_blocks": 256, "options": {}}
        self.engines: list[tuple[LLM, LedgerRunner]] = []
        self.answer = ANSWER
        self.has_logits = False
        self.tokenizer = byte_tokenizer()

    def ids(self, text: str) -> list[int]:
        """Its tokens, one a byte."""
        return self.tokenizer.encode(text)

    def _choose(self, seq: Any) -> int:
        ids = [*self.ids(self.answer), END]
        return ids[min(seq.num_completion_tokens, len(ids) - 1)]

    def get_llm(self, name: str) -> LLM:
        if not self.engines or not self.llm.is_healthy:
            kind: dict[str, Any] = (
                {"runner": LogitsRunner, "end_token_ids": (END,)} if self.has_logits else {"choose": self._choose}
            )
            self.engines.append(scripted_llm(tokenizer=self.tokenizer, vocab_size=END + 1, eos=END, **kind, **self.options))
        return self.llm

    def loaded(self) -> dict[str, LLM]:
        return {"live": self.llm} if self.engines and self.llm.is_healthy else {}

    @property
    def llm(self) -> LLM:
        return self.engines[-1][0]

    @property
    def runner(self) -> LedgerRunner:
        return self.engines[-1][1]

    def idle(self) -> bool:
        gc.collect()
        snapshot = self.llm.snapshot()
        return snapshot.num_running == snapshot.num_waiting == snapshot.num_used_blocks == 0
