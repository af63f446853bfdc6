"""From a constraint to a matcher: compiled on the caller's thread, bounded in time and size, and kept for the next request.

One compiler per engine, since a grammar is compiled against its vocabulary. Any thread. llguidance is imported on first use.
"""

import json
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minivllm_plugin.errors import ConfigError, InvalidRequestError, UnsupportedFeatureError
from minivllm_plugin.structured.params import StructuredOutputsParams

if TYPE_CHECKING:  # importing the hooks' registries must not load tokenizers
    from minivllm_plugin.serving.tokenizer import Tokenizer

__all__ = ["CompiledGrammar", "GrammarCompiler"]

KEPT_GRAMMARS = 128
COMPILE_SECONDS = 10.0
# Between two JSON tokens. Unbounded, a small model may fill its budget with line breaks; models are trained on a few.
WHITESPACE = r"[ \n\r\t]{0,16}"


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A constraint, ready for any number of requests. ``matcher`` is a prototype: copied, never advanced."""

    params: StructuredOutputsParams
    matcher: Any
    vocab_size: int

    def new_matcher(self) -> Any:
        """A matcher at the start of a completion."""
        return self.matcher.deep_copy()

    def __repr__(self) -> str:
        return f"CompiledGrammar({self.params.kind})"


class GrammarCompiler:
    """Compiles constraints for one vocabulary.

    Args:
        tokenizer: None for a model without one: everything is refused.
        vocab_size: columns of the logits; ids beyond the tokenizer's are never allowed.
    """

    def __init__(self, tokenizer: "Tokenizer | None", vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._vocabulary: Any = None
        self._kept: OrderedDict[str, CompiledGrammar] = OrderedDict()

    def compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """The compiled form of ``params``.

        Raises:
            InvalidRequestError: the constraint is malformed, contradicts itself, or takes too long to compile.
            UnsupportedFeatureError: a JSON schema uses a keyword that cannot be enforced, or the model has no tokenizer or
                no end token.
            ConfigError: llguidance is not installed.
        """
        key = params.key
        with self._lock:
            known = self._kept.get(key)
            if known is not None:
                self._kept.move_to_end(key)
                return known
        compiled = self._within_time(params)
        with self._lock:
            self._kept[key] = compiled
            while len(self._kept) > KEPT_GRAMMARS:
                self._kept.popitem(last=False)
        return compiled

    def _within_time(self, params: StructuredOutputsParams) -> CompiledGrammar:
        # The library bounds its own work (fuel, states, symbols); the clock is for whatever that misses. It drops the GIL.
        pool = ThreadPoolExecutor(1, thread_name_prefix="minivllm-grammar")
        try:
            return pool.submit(self._compile, params).result(COMPILE_SECONDS)
        except FutureTimeoutError:
            raise InvalidRequestError(
                f"the {params.kind} constraint took more than {COMPILE_SECONDS:g} s to compile; make it smaller"
            ) from None
        finally:
            pool.shutdown(wait=False)

    def _compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        llguidance = _library()
        vocabulary = self._vocabulary_of(llguidance)
        try:
            grammar = _grammar(llguidance, params)
        except ValueError as error:
            raise InvalidRequestError(f"the {params.kind} constraint is malformed: {error}") from error
        matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0)
        if matcher.is_error():
            raise _refusal(params, matcher.get_error())
        return CompiledGrammar(params, matcher, self._vocab_size)

    def _vocabulary_of(self, llguidance: Any) -> Any:
        with self._lock:
            if self._vocabulary is None:
                if self._tokenizer is None:
                    raise UnsupportedFeatureError("structured outputs need a tokenizer, and this model has none (dummy weights)")
                ends = [token for token in self._tokenizer.eos_token_ids if token < self._vocab_size]
                if not ends:
                    raise UnsupportedFeatureError("structured outputs need an end token, and this model names none")
                self._vocabulary = llguidance.LLTokenizer(self._tokenizer.to_json(), n_vocab=self._vocab_size, eos_token=ends)
            return self._vocabulary


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ConfigError("structured outputs need llguidance, which is not installed here: pip install llguidance") from error
    return llguidance


def _grammar(llguidance: Any, params: StructuredOutputsParams) -> str:
    matcher = llguidance.LLMatcher
    options = {"whitespace_pattern": WHITESPACE}
    if params.kind == "json":
        schema = json.loads(params.json)  # type: ignore[arg-type]  # text since it was checked
        return str(matcher.grammar_from_json_schema(json.dumps({} if schema is True else schema), overrides=options))
    if params.kind == "json_object":
        return str(matcher.grammar_from_json_schema('{"type": "object"}', overrides=options))
    if params.kind == "regex":
        return str(matcher.grammar_from_regex(params.regex))
    if params.kind == "choice":
        assert params.choice is not None
        return str(matcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice) for choice in params.choice)))
    if params.kind == "grammar":
        return str(llguidance.grammar_from("grammar", params.grammar))
    assert params.structural_tag is not None
    tags = [
        llguidance.StructTag(trigger=tag.trigger, begin=tag.begin, grammar=tag.schema, end=tag.end)
        for tag in params.structural_tag
    ]
    return str(llguidance.StructTag.to_grammar(tags, assume_special=False))


def _refusal(params: StructuredOutputsParams, message: str) -> InvalidRequestError:
    first = message.strip().splitlines()[0] if message.strip() else "no reason given"
    if params.kind == "json" and ("Unimplemented" in message or "Unknown format" in message):
        return UnsupportedFeatureError(
            f"the JSON schema asks for what cannot be enforced: {first}; leave it out and check it after"
        )
    return InvalidRequestError(f"the {params.kind} constraint cannot be used: {message.strip()[:500]}")
