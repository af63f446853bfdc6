"""Engines with logits and a tokenizer but no model, under structured outputs; and ways through a grammar without an engine."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import toy_tokenizers

from minivllm_plugin import LLM
from minivllm_plugin.config import EngineConfig
from minivllm_plugin.engine.admission import Limits
from minivllm_plugin.engine.llm_engine import LLMEngine
from minivllm_plugin.engine.scheduler import Scheduler
from minivllm_plugin.serving.loading import Loaded
from minivllm_plugin.serving.tokenizer import Tokenizer
from minivllm_plugin.structured.compiler import CompiledGrammar
from minivllm_plugin.testing import LogitsRunner


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token a byte, and two end tokens: ``</s>`` and ``<|im_end|>``."""
    backend = toy_tokenizers.byte_per_token()
    ends = [backend.token_to_id("</s>"), backend.token_to_id("<|im_end|>")]
    directory = tmp_path_factory.mktemp("bytes")
    toy_tokenizers.save(backend, directory, {"eos_token": "</s>"}, generation_config={"eos_token_id": ends})
    return Tokenizer.load(directory)


@dataclass
class Engines:
    """Makes engines over :class:`LogitsRunner`, and closes them."""

    tokenizer: Tokenizer
    made: list[LLM]

    def __call__(
        self, logits: Any = None, *, vocab_size: int = 300, num_blocks: int = 200, tokenizer: Any = ..., **options: Any
    ) -> tuple[LLM, LogitsRunner]:
        own: Tokenizer | None = self.tokenizer if tokenizer is ... else tokenizer
        ends = (0,) if own is None else own.eos_token_ids
        config = EngineConfig.from_options("scripted", {"num_blocks": num_blocks, "block_size": 4, **options})
        runners: list[LogitsRunner] = []

        def loader(config: EngineConfig) -> tuple[LLMEngine, Loaded]:
            scheduler = Scheduler(
                config.max_num_sequences,
                config.max_num_batched_tokens,
                num_blocks,
                4,
                ends[0],
                end_token_ids=ends[1:],
                enable_chunked_prefill=config.enable_chunked_prefill,
                enable_prefix_caching=config.enable_prefix_caching,
            )
            runners.append(LogitsRunner.for_scheduler(scheduler, vocab_size=vocab_size, logits=logits, end_token_ids=ends))
            limits = Limits(vocab_size, num_blocks * 4)
            return LLMEngine(scheduler, runners[0], limits), Loaded(limits, own, {}, num_blocks, "none", "none")

        self.made.append(LLM.from_loader(config, loader))
        return self.made[-1], runners[0]


@pytest.fixture
def engines(byte_tokenizer: Tokenizer) -> Iterator[Engines]:
    """``engines(logits=None, num_blocks=…, **options)``: an LLM and its runner; all are closed at the end."""
    factory = Engines(byte_tokenizer, [])
    yield factory
    for llm in factory.made:
        llm.close()


@pytest.fixture(scope="session")
def walk(byte_tokenizer: Tokenizer) -> Callable[[CompiledGrammar, random.Random], str | None]:
    """``walk(compiled, rng)``: the text of a random way through a grammar to its end; None when 500 tokens were not enough."""
    closing = {byte_tokenizer.encode(text)[0] for text in '"}],:'}

    def go(compiled: CompiledGrammar, rng: random.Random) -> str | None:
        matcher = compiled.new_matcher()
        mask = numpy.zeros((compiled.vocab_size + 31) // 32, dtype=numpy.int32)
        tokens: list[int] = []
        for _ in range(500):
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            bits = numpy.unpackbits(mask.view(numpy.uint8), count=compiled.vocab_size, bitorder="little")
            allowed = numpy.flatnonzero(bits).tolist()
            assert allowed, "the grammar is at a dead end"
            structural = [token for token in allowed if token in closing or token in byte_tokenizer.eos_token_ids]
            token = rng.choice(structural if structural and rng.random() < 0.25 else allowed)
            if token in byte_tokenizer.eos_token_ids:
                return byte_tokenizer.decode(tokens)
            assert matcher.consume_tokens([token])
            tokens.append(token)
        return None

    return go


@pytest.fixture(scope="session")
def accepts(byte_tokenizer: Tokenizer) -> Callable[[CompiledGrammar, str], bool]:
    """``accepts(compiled, text)``: whether the grammar allows exactly this text."""

    def ask(compiled: CompiledGrammar, text: str) -> bool:
        matcher = compiled.new_matcher()
        tokens = byte_tokenizer.encode(text, add_special_tokens=False)
        return matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()

    return ask
