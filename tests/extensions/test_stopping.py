"""Stop criteria: when they are asked, what they see, how they end a request, and how they fail."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm_plugin import LLM, SamplingParams
from minivllm_plugin.engine.admission import Limits
from minivllm_plugin.engine.llm_engine import LLMEngine
from minivllm_plugin.engine.scheduler import Scheduler
from minivllm_plugin.errors import RequestFailedError
from minivllm_plugin.extensions import Extensions
from minivllm_plugin.extensions.stopping import StopContext
from minivllm_plugin.hookspecs import hookimpl
from minivllm_plugin.testing import HashedTokens, LedgerRunner, ScriptedTokens, scripted_llm

VOCAB = 1000


class State:
    """An object whose end can be watched."""

    def __init__(self) -> None:
        self.calls = 0


class Criterion:
    """Asks ``decide``; keeps what it was shown."""

    def __init__(self, decide: Callable[[StopContext], Any]) -> None:
        self.decide = decide
        self.shown: dict[str, list[list[int]]] = {}
        self.states: list[weakref.ref[State]] = []

    def validate(self, value: Any, params: SamplingParams) -> None:
        if value == "bad":
            raise ValueError("no such end")

    def new_state(self, request: Any) -> State:
        self.shown[request.request_id] = []
        state = State()
        self.states.append(weakref.ref(state))
        return state

    def check(self, context: StopContext) -> Any:
        context.state.calls += 1
        self.shown[context.request_id].append(list(context.output_token_ids))
        return self.decide(context)


def live(decide: Callable[[StopContext], Any], *tokens: int, more: Any = None, **options: Any) -> tuple[LLM, Criterion]:
    criterion = Criterion(decide)

    class Plugin:
        minivllm_name = "acme"

        @hookimpl
        def minivllm_register_stop_criteria(self, registry: Any) -> None:
            registry.add("done", criterion)
            for name, other in (more or {}).items():
                registry.add(name, other)

    choose = ScriptedTokens(dict.fromkeys(("a", "b", "c"), tokens), HashedTokens(VOCAB))
    return scripted_llm(vocab_size=VOCAB, choose=choose, options={"plugins": [Plugin()]}, **options)[0], criterion


def after(count: int) -> Callable[[StopContext], str | None]:
    return lambda context: f"after {count}" if len(context.output_token_ids) >= count else None


def asked(value: Any = 1, **params: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 10, "extra_args": {"done": value}, **params})


def test_its_reason_ends_the_request_and_its_token_stays() -> None:
    llm, criterion = live(after(3), 11, 12, 13, 14, 15)
    with llm:
        [output] = llm.submit([1, 2], asked(), request_id="a").result().outputs
        assert (output.token_ids, output.finish_reason, output.stop_reason) == ([11, 12, 13], "stop", "after 3")
        assert criterion.shown["a"] == [[11], [11, 12], [11, 12, 13]]
        [plain] = llm.submit([1, 2], SamplingParams(max_tokens=5), request_id="b").result().outputs
        assert plain.token_ids == [11, 12, 13, 14, 15]
        assert "b" not in criterion.shown


def test_it_is_asked_from_min_tokens_on_and_after_the_built_in_ends() -> None:
    llm, criterion = live(after(1), 11, 12, 13, 0, 15)
    with llm:
        [late] = llm.submit([1], asked(min_tokens=3), request_id="a").result().outputs
        assert (late.token_ids, late.stop_reason) == ([11, 12, 13], "after 1")
        assert criterion.shown["a"] == [[11, 12, 13]]
        [ended] = llm.submit([1], asked(min_tokens=4), request_id="b").result().outputs
        assert (ended.token_ids[-1], ended.finish_reason, ended.stop_reason) == (0, "stop", None)  # the end token came first
        [cut] = llm.submit([1], asked(max_tokens=1), request_id="c").result().outputs
        assert (cut.finish_reason, cut.stop_reason) == ("length", None)


def test_of_several_the_first_added_counts_and_each_is_asked_for_by_name() -> None:
    other = Criterion(after(2))
    llm, criterion = live(after(2), 11, 12, 13, more={"other": other})
    with llm:
        both = SamplingParams(max_tokens=5, extra_args={"other": 1, "done": 2})
        assert llm.submit([1], both, request_id="a").result().outputs[0].stop_reason == "after 2"
        assert (criterion.shown["a"], other.shown["a"]) == ([[11], [11, 12]], [[11]])
        llm.submit([1], SamplingParams(max_tokens=5, extra_args={"other": 1}), request_id="b").result()
        assert "b" not in criterion.shown


@pytest.mark.parametrize(
    ("decide", "message"),
    [
        (lambda context: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda context: True, r"check\(\) must return a reason or None, got True"),
        (lambda context: "", r"got ''"),
        (lambda context: context.text(), "ValueError: this model has no tokenizer"),
        (lambda context: context.text(0), "ValueError: this model has no tokenizer"),
    ],
)
def test_one_that_fails_ends_its_request_and_no_other(decide: Callable[[StopContext], Any], message: str) -> None:
    llm, _ = live(lambda context: decide(context) if len(context.output_token_ids) == 2 else None, 11, 12, 13)
    with llm:
        bad, good = llm.submit([1], asked(), request_id="a"), llm.submit([2], SamplingParams(max_tokens=3), request_id="b")
        with pytest.raises(
            RequestFailedError, match=f"request 'a' failed: stop criterion 'done' of plugin 'acme' failed: .*{message}"
        ):
            bad.result()
        assert good.result().outputs[0].token_ids == [11, 12, 13]
        assert llm.is_healthy


def test_its_token_is_part_of_the_text_and_it_can_read_text() -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    from minivllm_plugin.serving.tokenizer import Tokenizer
    from minivllm_plugin.serving.tokenizer_files import TokenizerSettings

    backend = Backend(models.BPE(vocab={"ABC": 0, "DEF": 1, "G": 2, "H": 3}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    seen: list[tuple[str, str]] = []

    def decide(context: StopContext) -> str | None:
        seen.append((context.text(), context.text(1)))
        return "a G" if context.text(1) == "G" else None

    llm, _ = live(decide, 1, 3, 2, 1, tokenizer=Tokenizer(backend, TokenizerSettings()), eos=-1)
    with llm:
        streamed = [delta.text for delta in llm.submit([1], asked(), request_id="a")]
        [output] = llm.submit([1], asked(), request_id="b").result().outputs
    assert seen[:3] == [("DEF", "DEF"), ("DEFH", "H"), ("DEFHG", "G")]
    assert "".join(streamed) == output.text == "DEFHG"
    assert (output.token_ids, output.stop_reason) == ([1, 3, 2], "a G")


def test_a_bad_value_is_refused_where_the_request_is_made() -> None:
    llm, _ = live(after(1))
    with llm, pytest.raises(ValueError, match="stop criterion 'done' of plugin 'acme' refuses 'bad': no such end"):
        llm.submit([1], asked("bad"))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 14), st.integers(1, 12)), min_size=1, max_size=6),
    st.integers(6, 14),
    st.integers(1, 12),
    st.integers(1, 4),
)
def test_it_sees_every_token_once_whatever_the_schedule_and_nothing_stays(
    requests: list[tuple[int, int]], num_blocks: int, budget: int, most: int
) -> None:
    criterion = Criterion(lambda context: "enough" if len(context.output_token_ids) == context.value else None)
    scheduler = Scheduler(most, budget, num_blocks, 4, 0, enable_chunked_prefill=True)
    runner = LedgerRunner.for_scheduler(scheduler, vocab_size=VOCAB)
    engine = LLMEngine(scheduler, runner, Limits(VOCAB, num_blocks * 4))
    extensions = Extensions.builtin()
    extensions.stopping.add("done", criterion)
    extensions.attach(engine, None)
    chooser = HashedTokens(VOCAB)
    seqs = [
        engine.add_prompt([index + 1] * length, asked(enough, ignore_eos=True), request_id=f"r{index}")
        for index, (length, enough) in enumerate(requests)
    ]
    while not all(seq.is_finished for seq in seqs):
        engine.step()
    for index, ((length, enough), seq) in enumerate(zip(requests, seqs, strict=True)):
        expected = chooser.continue_prompt([index + 1] * length, min(enough, 10))
        assert seq.completion_token_ids == expected[: len(seq.completion_token_ids)]
        checked = len(expected) - (enough >= 10)  # the tenth ends it by length before anybody is asked
        if seq.num_tokens < num_blocks * 4:
            assert criterion.shown[f"r{index}"] == [expected[:count] for count in range(1, checked + 1)]
            assert (seq.finish_reason, seq.stop_reason) == (("stop", "enough") if enough < 10 else ("length", None))
    assert [state for state in criterion.states if state() is not None] == []
