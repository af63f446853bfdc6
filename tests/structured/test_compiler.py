"""Compiling constraints: refused before anything is queued, bounded in time and size, kept, and safe from several threads."""

import json
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import llguidance
import pytest

from minivllm_plugin import SamplingParams
from minivllm_plugin.errors import InvalidRequestError, UnsupportedFeatureError
from minivllm_plugin.serving.tokenizer import Tokenizer
from minivllm_plugin.structured import StructuralTag, StructuredOutputsParams
from minivllm_plugin.structured import compiler as module
from minivllm_plugin.structured.compiler import CompiledGrammar, GrammarCompiler
from minivllm_plugin.structured.params import MAX_CHOICES, MAX_GRAMMAR_CHARACTERS

Accepts = Callable[[CompiledGrammar, str], bool]


@pytest.fixture
def compiler(byte_tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(byte_tokenizer, 300)


@pytest.mark.parametrize(
    ("params", "right", "wrong"),
    [
        ({"json_object": True}, ['{"a":[1,{}]}', "{}"], ["[]", "1", "{} "]),
        ({"regex": r"[ab]{2}\d?"}, ["ab", "bb7"], ["a", "ab77", "xab"]),
        ({"choice": ["a", "ab", 'say "hi"\n', "é😀", "back\\slash"]},
         ["a", "ab", 'say "hi"\n', "é😀", "back\\slash"], ["b", "abc", ""]),
        ({"grammar": 'start: "x" y+\ny: /[0-9]/'}, ["x1", "x12"], ["x", "1"]),
        ({"grammar": 'root ::= "x" [0-9]+'}, ["x1", "x12"], ["x", "1"]),
        ({"structural_tag": [StructuralTag("<t>", "<t>", {"type": "integer"}, "</t>")]},
         ["free text", "<t>12</t>", "a <t>1</t> b <t>-2</t>"], ["a <t>x</t>", "<t>1"]),
        ({"structural_tag": [{"trigger": "<f", "begin": "<f=a>", "schema": {"type": "object"}, "end": "</f>"}]},
         ["<f=a>{}</f>", "<f=a>{" + " " * 16 + "}</f>"], ["<f=b>{}</f>", "<f=a>{" + " " * 17 + "}</f>"]),
    ],
)  # fmt: skip
def test_every_kind(
    compiler: GrammarCompiler, accepts: Accepts, params: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    compiled = compiler.compile(StructuredOutputsParams(**params))
    assert [text for text in right if not accepts(compiled, text)] == []
    assert [text for text in wrong if accepts(compiled, text)] == []
    assert repr(compiled) == f"CompiledGrammar({next(iter(params))})"


def test_a_pydantic_class_stands_for_its_schema(compiler: GrammarCompiler, accepts: Accepts) -> None:
    from pydantic import BaseModel, Field

    class Part(BaseModel):
        size: int = Field(ge=0, le=9)

    class Whole(BaseModel):
        parts: list[Part] = Field(max_length=2)
        name: str | None = None

    compiled = compiler.compile(StructuredOutputsParams(json=Whole))
    assert accepts(compiled, '{"parts":[{"size":3}],"name":null}')
    assert accepts(compiled, '{"parts":[]}')
    assert not accepts(compiled, '{"parts":[{"size":10}]}')


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"json": {"type": "integer"}, "regex": "a"},
        {"json": "no json"},
        {"json": 3},
        {"json": {"a": {1, 2}}},
        {"json": {"minimum": float("nan")}},
        {"json_object": "yes"},
        {"regex": ""},
        {"regex": 3},
        {"regex": "a" * (MAX_GRAMMAR_CHARACTERS + 1)},
        {"regex": "\ud800"},
        {"choice": []},
        {"choice": "abc"},
        {"choice": ["a", ""]},
        {"choice": ["a"] * (MAX_CHOICES + 1)},
        {"grammar": "  "},
        {"structural_tag": []},
        {"structural_tag": [("<t>", "<t>", {})]},
        {"structural_tag": [("<t>", "<u>", {}, "</t>")]},
        {"structural_tag": [("", "<u>", {}, "</t>")]},
        {"structural_tag": [("<t>", "<t>", 3, "</t>")]},
        {"json": json.dumps({"enum": ["x" * MAX_GRAMMAR_CHARACTERS]})},
    ],
)
def test_parameters_are_checked_when_they_are_made(params: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        StructuredOutputsParams(**params)


@pytest.mark.parametrize(
    "params",
    [
        {"regex": "("},
        {"regex": "(?=a)"},
        {"grammar": "start: missing"},
        {"grammar": "nothing at all {"},
        {"json": {"type": "strng"}},
        {"json": {"type": "array", "uniqueItems": True}},
        {"structural_tag": [("<t>", "<t>", {"type": "strng"}, "</t>")]},
    ],
)
def test_a_bad_constraint_is_refused_before_it_is_queued(engines: Any, params: dict[str, Any]) -> None:
    llm, runner = engines()
    asked = SamplingParams(structured_outputs=StructuredOutputsParams(**params))
    with pytest.raises(InvalidRequestError):
        llm.submit([1, 2], asked)
    with pytest.raises(InvalidRequestError):
        llm.generate([[1, 2], [3]], [SamplingParams(), asked], use_tqdm=False)
    assert runner.num_calls == 0
    assert llm.snapshot().num_waiting == llm.snapshot().num_running == 0


def test_the_name_in_extra_args_is_the_engine_s_own(engines: Any) -> None:
    llm, _ = engines()
    with pytest.raises(InvalidRequestError, match=r"SamplingParams\(structured_outputs=…\)"):
        llm.submit([1], SamplingParams(extra_args={"structured_outputs": {"type": "object"}}))


def test_without_a_tokenizer_everything_is_refused(engines: Any) -> None:
    llm, _ = engines(tokenizer=None)
    with pytest.raises(UnsupportedFeatureError, match="tokenizer"):
        llm.submit([1], SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True)))


def test_without_an_end_token_everything_is_refused(tmp_path: Path) -> None:
    import toy_tokenizers

    tokenizer = Tokenizer.load(toy_tokenizers.save(toy_tokenizers.byte_per_token(), tmp_path))
    with pytest.raises(UnsupportedFeatureError, match="end token"):
        GrammarCompiler(tokenizer, 300).compile(StructuredOutputsParams(json_object=True))


@pytest.mark.parametrize("kind", ["wordpiece", "words"])
def test_a_tokenizer_that_cannot_be_read_is_refused_by_type(tmp_path: Path, kind: str) -> None:
    import toy_tokenizers

    backend = getattr(toy_tokenizers, kind)()
    backend.add_special_tokens(["</s>"])
    tokenizer = Tokenizer.load(toy_tokenizers.save(backend, tmp_path, {"eos_token": "</s>"}))
    with pytest.raises(UnsupportedFeatureError, match="tokenizer"):
        GrammarCompiler(tokenizer, 300).compile(StructuredOutputsParams(json_object=True))


@pytest.mark.parametrize("vocab_size", [260, 261, 300, 352, 4096])
def test_columns_beyond_the_tokenizer_are_never_allowed(byte_tokenizer: Tokenizer, walk: Any, vocab_size: int) -> None:
    compiled = GrammarCompiler(byte_tokenizer, vocab_size).compile(StructuredOutputsParams(json_object=True))
    assert compiled.vocab_size == vocab_size
    texts = [walk(compiled, random.Random(seed)) for seed in range(10)]  # decoding an id beyond the tokenizer's would lose it
    assert all(isinstance(json.loads(text), dict) for text in texts if text is not None)


def test_time_is_bounded(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    whole = GrammarCompiler._compile

    def stuck(self: GrammarCompiler, params: StructuredOutputsParams) -> CompiledGrammar:
        release.wait(30)
        return whole(self, params)

    monkeypatch.setattr(module, "COMPILE_SECONDS", 0.05)
    monkeypatch.setattr(GrammarCompiler, "_compile", stuck)
    for number in range(module.MAX_COMPILING + 2):  # the last ones do not even get a turn
        with pytest.raises(InvalidRequestError, match=r"more than 0\.05 s"):
            compiler.compile(StructuredOutputsParams(regex=f"a{number}"))
    stuck_threads = [thread for thread in threading.enumerate() if thread.name == "minivllm-grammar"]
    assert len(stuck_threads) == module.MAX_COMPILING
    assert all(thread.daemon for thread in stuck_threads)  # an interpreter that ends does not wait for them
    release.set()
    for thread in stuck_threads:
        thread.join(30)
    monkeypatch.setattr(module, "COMPILE_SECONDS", 30)
    compiler.compile(StructuredOutputsParams(regex="b"))  # the turns were given back


def test_what_was_compiled_is_kept_and_the_oldest_goes(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_GRAMMARS", 2)
    first = compiler.compile(StructuredOutputsParams(json={"type": "integer"}))
    assert compiler.compile(StructuredOutputsParams(json='{"type": "integer"}')) is first
    second = compiler.compile(StructuredOutputsParams(regex="a"))
    assert compiler.compile(StructuredOutputsParams(json={"type": "integer"})) is first
    compiler.compile(StructuredOutputsParams(regex="b"))  # puts out the one that was asked for longest ago: regex a
    assert compiler.compile(StructuredOutputsParams(json={"type": "integer"})) is first
    assert compiler.compile(StructuredOutputsParams(regex="a")) is not second


def test_a_refused_constraint_is_not_kept(compiler: GrammarCompiler) -> None:
    for _ in range(2):
        with pytest.raises(InvalidRequestError):
            compiler.compile(StructuredOutputsParams(regex="("))


def test_several_threads_compile_at_once(compiler: GrammarCompiler, accepts: Accepts) -> None:
    def job(number: int) -> bool:
        compiled = compiler.compile(StructuredOutputsParams(regex=f"n{number % 7}"))
        return accepts(compiled, f"n{number % 7}") and not accepts(compiled, f"n{(number + 1) % 7}")

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(job, range(60)))


def test_matchers_of_one_grammar_do_not_share_their_place(compiler: GrammarCompiler, byte_tokenizer: Tokenizer) -> None:
    compiled = compiler.compile(StructuredOutputsParams(choice=["ab", "cd"]))
    first, second = compiled.new_matcher(), compiled.new_matcher()
    assert first.consume_tokens(byte_tokenizer.encode("a"))
    assert second.consume_tokens(byte_tokenizer.encode("cd"))
    assert first.consume_tokens(byte_tokenizer.encode("b"))
    assert first.is_accepting()
    assert second.is_accepting()


def test_thousands_of_choices_with_one_beginning(compiler: GrammarCompiler, walk: Any, accepts: Accepts) -> None:
    choices = [f"answer {number}" for number in range(MAX_CHOICES)]
    compiled = compiler.compile(StructuredOutputsParams(choice=choices))
    assert {walk(compiled, random.Random(seed)) for seed in range(20)} <= set(choices)
    assert accepts(compiled, "answer 4")
    assert accepts(compiled, "answer 4095")
    assert not accepts(compiled, "answer 4096")


def test_what_is_too_wide_for_the_library_is_refused_before_it_is_queued(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ambiguous grammar whose very first mask has too many ways; for so small a vocabulary, with a lower limit."""
    monkeypatch.setattr(llguidance, "LLParserLimits", partial(llguidance.LLParserLimits, step_max_items=10))
    with pytest.raises(InvalidRequestError, match="Too many items"):
        compiler.compile(StructuredOutputsParams(grammar='start: x\nx: x x | /[a-z]/ | /[ ]/ | x "a" x'))


def test_an_object_with_thousands_of_optional_properties(compiler: GrammarCompiler, accepts: Accepts) -> None:
    schema = {
        "type": "object",
        "properties": {f"key{n}": {"type": "integer"} for n in range(2500)},
        "additionalProperties": False,
    }
    compiled = compiler.compile(StructuredOutputsParams(json=schema))
    assert accepts(compiled, '{"key7":1,"key2499":2}')
    assert not accepts(compiled, '{"key2500":1}')
