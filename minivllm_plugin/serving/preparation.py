"""From what a caller asked to what the engine takes: words become tokens, constraints become grammars, extensions are checked.

Any caller's thread, before anything is queued; the engine thread never tokenises and never compiles.
"""

from functools import partial

from minivllm_plugin.engine.admission import Limits
from minivllm_plugin.errors import InvalidRequestError, UnsupportedFeatureError
from minivllm_plugin.extensions import Extensions
from minivllm_plugin.parsing.reasoning import ThinkParser
from minivllm_plugin.sampling_parameters import SamplingParams
from minivllm_plugin.serving.tokenizer import Tokenizer
from minivllm_plugin.structured.compiler import GrammarCompiler
from minivllm_plugin.structured.processor import NAME as STRUCTURED_OUTPUTS
from minivllm_plugin.structured.thinking import NAME as THINKING_BUDGET
from minivllm_plugin.structured.thinking import ThinkingBudget

__all__ = ["RequestPreparation"]


class RequestPreparation:
    """Prepares the sampling parameters of one engine's requests.

    Args:
        tokenizer: None for a model without one.
        limits: of the engine.
        extensions: whose names may stand in ``extra_args``.
    """

    def __init__(self, tokenizer: Tokenizer | None, limits: Limits, extensions: Extensions) -> None:
        self._tokenizer = tokenizer
        self._extensions = extensions
        self._grammars = GrammarCompiler(tokenizer, limits.vocab_size)

    def prepare(self, params: SamplingParams) -> SamplingParams:
        """``params`` as the engine takes them.

        Raises:
            InvalidRequestError: a constraint cannot be used, or an extension is unknown or refuses its value.
            UnsupportedFeatureError: the model has no tokenizer, and text is asked about.
        """
        changes: dict[str, object] = {}
        if params.bad_words:
            changes["bad_words_token_ids"] = (*params.bad_words_token_ids, *self._word_tokens(params.bad_words))
            changes["bad_words"] = ()
        if params.structured_outputs is not None:
            compiled = self._grammars.compile(params.structured_outputs)
            changes["extra_args"] = {**(params.extra_args or {}), STRUCTURED_OUTPUTS: compiled}
            changes |= {"min_tokens": 0, "ignore_eos": False}  # it ends with its value: nothing else would be allowed then
        if params.thinking_token_budget is not None:
            if params.structured_outputs is not None:
                raise InvalidRequestError(
                    "structured_outputs hold from the first token: there is no reasoning to limit; leave one of the two out"
                )
            changes["extra_args"] = {**(params.extra_args or {}), THINKING_BUDGET: self._budget(params.thinking_token_budget)}
        if changes:
            params = params.replace(**changes)
        self._extensions.check_extra_args(params)
        return params

    def _budget(self, num_tokens: int) -> ThinkingBudget:
        if self._tokenizer is None:
            raise UnsupportedFeatureError("thinking_token_budget needs a tokenizer, and this model has none")
        closing = tuple(self._tokenizer.encode(ThinkParser.CLOSE, add_special_tokens=False))
        return ThinkingBudget(num_tokens, closing, partial(self._tokenizer.decode, skip_special_tokens=False))

    def _word_tokens(self, words: object) -> list[tuple[int, ...]]:
        """Each word as it is tokenised at the start of a text and after a space (vLLM's rule)."""
        if self._tokenizer is None:
            raise UnsupportedFeatureError("bad_words need a tokenizer, and this model has none; use bad_words_token_ids")
        found: list[tuple[int, ...]] = []
        for word in words:  # type: ignore[attr-defined]  # a tuple of strings since they were checked
            word = word.lstrip() or word  # white space alone is meant as it stands
            alone = tuple(self._tokenizer.encode(word, add_special_tokens=False))
            spaced = tuple(self._tokenizer.encode(" " + word, add_special_tokens=False))
            found += [tokens for tokens in (alone, spaced) if tokens]
        return list(dict.fromkeys(found))
