"""An LLM without a model: the real service, streams and scheduler over a :class:`LedgerRunner`. Starts in milliseconds."""

from typing import Any

from minivllm_plugin.config import EngineConfig
from minivllm_plugin.engine.admission import Limits
from minivllm_plugin.engine.llm_engine import LLMEngine
from minivllm_plugin.engine.scheduler import Scheduler
from minivllm_plugin.serving.llm import LLM
from minivllm_plugin.serving.loading import Loaded, speculation_of
from minivllm_plugin.serving.tokenizer import Tokenizer
from minivllm_plugin.testing.ledger import LedgerRunner

__all__ = ["scripted_llm"]


def scripted_llm(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    vocab_size: int = 1000,
    eos: int = 0,
    tokenizer: Tokenizer | None = None,
    options: dict[str, Any] | None = None,
    runner: type[LedgerRunner] = LedgerRunner,
    **runner_options: Any,
) -> tuple[LLM, LedgerRunner]:
    """A live :class:`LLM` and the runner under it.

    Args:
        num_blocks, block_size: the pool; the context window is what it holds.
        vocab_size: token ids are below it.
        tokenizer: without one, text is refused and outputs have no text.
        options: further fields of :class:`~minivllm_plugin.config.EngineConfig`. Tokens are guessed where
            ``num_speculative_tokens`` is one of them.
        runner: :class:`~minivllm_plugin.testing.LogitsRunner` for a plugin's logits processors.
        runner_options: of that class, such as ``choose``, ``gate`` or ``fail_on_call``.
    """
    config = EngineConfig.from_options("scripted", {"num_blocks": num_blocks, "block_size": block_size, **(options or {})})
    if config.num_speculative_tokens:
        runner_options.setdefault("can_speculate", True)
    runners: list[LedgerRunner] = []

    def loader(config: EngineConfig) -> tuple[LLMEngine, Loaded]:
        scheduler = Scheduler(
            config.max_num_sequences,
            config.max_num_batched_tokens,
            num_blocks,
            block_size,
            eos,
            enable_chunked_prefill=config.enable_chunked_prefill,
            enable_prefix_caching=config.enable_prefix_caching,
            policy=config.scheduling_policy,
        )
        runners.append(runner.for_scheduler(scheduler, vocab_size=vocab_size, **runner_options))
        scheduler.speculation = speculation_of(config, runners[0])
        limits = Limits(vocab_size, config.max_model_len or num_blocks * block_size)
        return LLMEngine(scheduler, runners[0], limits), Loaded(limits, tokenizer, {}, num_blocks, "none", "none")

    return LLM.from_loader(config, loader), runners[0]
