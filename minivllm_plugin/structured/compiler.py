"""From a constraint to a matcher: compiled on the caller's thread, bounded in time and size, and kept for the next request.

One compiler per engine, since a grammar is compiled against its vocabulary. Any thread. llguidance is imported on first use.
"""

import json
import queue
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minivllm_plugin.errors import ConfigError, InvalidRequestError, UnsupportedFeatureError
from minivllm_plugin.structured.json_schema import bounded_schema
from minivllm_plugin.structured.params import StructuralTag, StructuredOutputsParams

if TYPE_CHECKING:  # importing the hooks' registries must not load tokenizers
    from minivllm_plugin.serving.tokenizer import Tokenizer

__all__ = ["CompiledGrammar", "GrammarCompiler"]

KEPT_GRAMMARS = 128
COMPILE_SECONDS = 10.0
MAX_PLACES = 16_384  # in a grammar at once: an object with thousands of optional properties has as many
MAX_COMPILING = 4  # at once; more wait, within their time
# What llguidance says of things that are well formed, but beyond it.
BEYOND = ("Unimplemented", "Unknown format", "not supported", "only supported", "not disjoint")


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
        self._turns = threading.BoundedSemaphore(MAX_COMPILING)
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
        # The library bounds its own work (fuel, states, symbols) and drops the GIL; the clock is for whatever that misses.
        deadline = time.monotonic() + COMPILE_SECONDS
        done: queue.SimpleQueue[CompiledGrammar | BaseException] = queue.SimpleQueue()
        if self._turns.acquire(timeout=COMPILE_SECONDS):
            # Not from a pool: the interpreter would wait at its exit for one that never ends.
            thread = threading.Thread(target=self._work, args=(params, done), name="minivllm-grammar", daemon=True)
            thread.start()
            try:
                result = done.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                pass
            else:
                if isinstance(result, BaseException):
                    raise result
                return result
        raise InvalidRequestError(
            f"the {params.kind} constraint took more than {COMPILE_SECONDS:g} s to compile; make it smaller"
        )

    def _work(self, params: StructuredOutputsParams, done: "queue.SimpleQueue[CompiledGrammar | BaseException]") -> None:
        try:
            done.put(self._compile(params))
        except BaseException as error:  # raised where the result is waited for
            done.put(error)
        finally:
            self._turns.release()

    def _compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        llguidance = _library()
        vocabulary = self._vocabulary_of(llguidance)
        try:
            grammar = _grammar(llguidance, params)
        except InvalidRequestError:
            raise
        except ValueError as error:
            raise InvalidRequestError(f"the {params.kind} constraint is malformed: {error}") from error
        limits = llguidance.LLParserLimits(max_items_in_row=MAX_PLACES, verbose_errors=False)
        matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise _refusal(params, matcher.get_error())
        first = matcher.deep_copy()
        first.compute_bitmask()  # what is too wide for the library shows here, mostly
        if first.is_error():
            raise _refusal(params, first.get_error())
        return CompiledGrammar(params, matcher, self._vocab_size)

    def _vocabulary_of(self, llguidance: Any) -> Any:
        with self._lock:
            if self._vocabulary is None:
                if self._tokenizer is None:
                    raise UnsupportedFeatureError("structured outputs need a tokenizer, and this model has none (dummy weights)")
                ends = [token for token in self._tokenizer.eos_token_ids if token < self._vocab_size]
                if not ends:
                    raise UnsupportedFeatureError("structured outputs need an end token, and this model names none")
                try:
                    self._vocabulary = llguidance.LLTokenizer(self._tokenizer.to_json(), n_vocab=self._vocab_size, eos_token=ends)
                except Exception as error:  # Rust's own, whatever it found in the file
                    raise UnsupportedFeatureError(
                        f"structured outputs cannot use this model's tokenizer: {error!s:.300}"
                    ) from error
            return self._vocabulary


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ConfigError("structured outputs need llguidance, which is not installed here: pip install llguidance") from error
    return llguidance


def _grammar(llguidance: Any, params: StructuredOutputsParams) -> str:
    matcher = llguidance.LLMatcher
    if params.kind == "json":
        assert params.json is not None
        schema = json.loads(params.json)  # type: ignore[arg-type]  # text since it was checked
        return str(matcher.grammar_from_json_schema(json.dumps(bounded_schema(schema))))
    if params.kind == "json_object":
        return str(matcher.grammar_from_json_schema(json.dumps(bounded_schema({"type": "object"}))))
    if params.kind == "regex":
        return str(matcher.grammar_from_regex(params.regex))
    if params.kind == "choice":
        assert params.choice is not None
        # A terminal, which is one automaton: as a rule, thousands of them with one beginning would be too many for the parser.
        choices = " | ".join(json.dumps(choice) for choice in params.choice)
        return str(matcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}\n"))
    if params.kind == "grammar":
        return str(llguidance.grammar_from("grammar", params.grammar))
    assert params.structural_tag is not None
    tags = [
        llguidance.StructTag(trigger=tag.trigger, begin=tag.begin, grammar=_tag_grammar(tag), end=tag.end)
        for tag in params.structural_tag
    ]
    return str(llguidance.StructTag.to_grammar(tags, assume_special=False))


def _tag_grammar(tag: StructuralTag) -> str:
    """The content of one tag: a schema within its bounds, or a grammar as it is."""
    assert isinstance(tag.schema, str)  # since it was checked
    try:
        schema = json.loads(tag.schema)
    except ValueError:
        return tag.schema
    return json.dumps(bounded_schema(schema))


def _refusal(params: StructuredOutputsParams, message: str) -> InvalidRequestError:
    text = message.strip() or "no reason given"
    if any(phrase in text for phrase in BEYOND):
        return UnsupportedFeatureError(
            f"the {params.kind} constraint asks for what cannot be enforced: {text.splitlines()[0][:300]}; "
            "leave it out and check it after"
        )
    return InvalidRequestError(f"the {params.kind} constraint cannot be used: {text[:500]}")
