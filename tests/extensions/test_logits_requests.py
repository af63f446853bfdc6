"""Logits processors over whole requests: every token seen once and in order, states freed, failures told to the caller."""

import gc
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from settled import settled_snapshot
from tiny_models import SHAPES, reference_model
from torch import Tensor

from minivllm_plugin import LLM, SamplingParams
from minivllm_plugin.engine.admission import Limits
from minivllm_plugin.engine.llm_engine import LLMEngine
from minivllm_plugin.engine.scheduler import Scheduler
from minivllm_plugin.errors import RequestFailedError
from minivllm_plugin.extensions import Extensions
from minivllm_plugin.extensions.logits import LogitsRow
from minivllm_plugin.hookspecs import hookimpl
from minivllm_plugin.testing import HashedLogits, LogitsRunner, RepeatingTokens, scripted_llm

VOCAB = 40


class State:
    """What a processor has seen of one request. An object of its own, so that its end can be watched."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.tokens: list[int] = []


class Witness:
    """A stateful processor that counts its calls: it forbids the last token to come again, and writes down all it sees."""

    argmax_invariant = False

    def __init__(self) -> None:
        self.seen: dict[str, list[int]] = {}
        self.states: list[weakref.ref[State]] = []

    def validate(self, value: Any, params: SamplingParams) -> None:
        return None

    def new_state(self, request: Any) -> State:
        assert request.request_id not in self.seen, "the state was made twice"
        self.seen[request.request_id] = []
        state = State()
        self.states.append(weakref.ref(state))
        return state

    def apply(self, logits: Tensor, rows: Sequence[LogitsRow]) -> None:
        for row, entry in zip(logits, rows, strict=True):
            output = entry.output_token_ids
            assert len(output) == len(entry.state.lengths), "a token was sampled twice, or not shown"
            entry.state.lengths.append(len(output))
            entry.state.tokens += output[-1:]
            self.seen[entry.request_id] = list(entry.state.tokens)
            if entry.value == "fail" and len(output) == 2:
                raise RuntimeError("on purpose")
            if output:
                row[output[-1]] = -torch.inf


def engine(witness: Witness, *, num_blocks: int = 64, budget: int = 64, most: int = 8, chunked: bool = True) -> LLMEngine:
    scheduler = Scheduler(most, budget, num_blocks, 4, 0, enable_chunked_prefill=chunked)
    made = LLMEngine(scheduler, LogitsRunner.for_scheduler(scheduler, vocab_size=VOCAB), Limits(VOCAB, num_blocks * 4))
    extensions = Extensions.builtin()
    extensions.logits.add("witness", witness)
    extensions.attach(made, None)
    return made


def params(index: int, value: str | None, length: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.0 if index % 2 else 0.8,
        seed=index,
        max_tokens=length,
        ignore_eos=True,
        extra_args=None if value is None else {"witness": value},
    )


def run(made: LLMEngine, requests: list[tuple[list[int], SamplingParams]]) -> list[Any]:
    seqs = [made.add_prompt(prompt, one, request_id=f"r{index}") for index, (prompt, one) in enumerate(requests)]
    for _ in range(2000):
        if all(seq.is_finished for seq in seqs):
            return seqs
        made.step()
        made.scheduler.check_integrity()
    raise AssertionError("it never ends")


REQUESTS = st.lists(
    st.tuples(
        st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=14),
        st.sampled_from(["watch", "watch", None, "fail"]),
        st.integers(1, 9),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=200, deadline=None)
@given(REQUESTS, st.integers(6, 14), st.integers(1, 12), st.integers(1, 4), st.booleans())
def test_a_stateful_processor_sees_every_token_once_in_order_whatever_the_schedule(
    requests: list[tuple[list[int], str | None, int]], num_blocks: int, budget: int, most: int, chunked: bool
) -> None:
    budget = budget if chunked else 16
    witness = Witness()
    made = engine(witness, num_blocks=num_blocks, budget=budget, most=most, chunked=chunked)
    asked = [(prompt, params(index, value, length)) for index, (prompt, value, length) in enumerate(requests)]
    seqs = run(made, asked)
    for index, ((prompt, value, length), seq) in enumerate(zip(requests, seqs, strict=True)):
        alone_witness = Witness()
        [alone] = run(engine(alone_witness), [(prompt, params(index, value, length))])
        assert seq.completion_token_ids == alone.completion_token_ids  # the company, failing or not, changes nothing
        assert (seq.finish_reason, seq.failure) == (alone.finish_reason, alone.failure)
        if value is not None:  # the newest token is shown with the next call, if there is one
            assert witness.seen[f"r{index}"] == (seq.completion_token_ids if seq.failure else seq.completion_token_ids[:-1])
        fails = value == "fail" and length >= 3
        assert (seq.finish_reason == "error") == fails
    assert [state for state in witness.states if state() is not None] == []


def test_preemption_really_happens_in_the_property_above() -> None:
    made = engine(Witness(), num_blocks=6, budget=12, most=4)
    seqs = run(made, [([index + 1] * 6, params(index, "watch", 9)) for index in range(4)])
    assert sum(seq.num_preemptions for seq in seqs) > 0


def test_requests_that_ask_for_none_never_reach_a_processor() -> None:
    witness = Witness()
    run(engine(witness), [([index + 1], params(index, None, 4)) for index in range(3)])
    assert (witness.seen, witness.states) == ({}, [])


class Plugin:
    minivllm_name = "acme"

    def __init__(self) -> None:
        self.witness = Witness()

    @hookimpl
    def minivllm_register_logits_processors(self, registry: Any) -> None:
        registry.add("witness", self.witness)


def test_a_processor_sees_one_token_a_call_beside_requests_that_are_guessed_for() -> None:
    found, seen = [], []
    for num_speculative_tokens in (0, 7):
        plugin = Plugin()
        llm, _ = scripted_llm(
            num_blocks=200,
            runner=LogitsRunner,
            vocab_size=VOCAB,
            logits=HashedLogits(VOCAB, RepeatingTokens(2**31)),
            options={"plugins": [plugin], "num_speculative_tokens": num_speculative_tokens},
        )
        with llm:
            asked = [params(1, "watch" if index < 2 else None, 100) for index in range(4)]
            streams = [llm.submit([5, 6, 7 + index], one, request_id=f"r{index}") for index, one in enumerate(asked)]
            found.append([stream.result().outputs[0].token_ids for stream in streams])
            seen.append(plugin.witness.seen)
            num_accepted = llm.snapshot().num_accepted_tokens
    assert found[0] == found[1]
    assert seen[0] == seen[1] == {f"r{index}": found[0][index][:-1] for index in range(2)}
    assert num_accepted > 10


def test_the_caller_learns_which_plugin_failed_and_neighbours_go_on() -> None:
    plugin = Plugin()
    llm, _ = scripted_llm(runner=LogitsRunner, vocab_size=VOCAB, options={"plugins": [plugin]})
    with llm:
        alone = llm.generate([5, 6], params(1, "watch", 8), use_tqdm=False)[0].outputs[0].token_ids
        plugin.witness.seen.clear()
        failing = llm.submit([1, 2, 3], params(0, "fail", 8), request_id="bad")
        fine = llm.submit([5, 6], params(1, "watch", 8), request_id="good")
        with pytest.raises(
            RequestFailedError, match=r"'bad' failed: logits processor 'witness' of plugin 'acme' failed: RuntimeError: on"
        ):
            failing.result()
        assert len(failing.output.outputs[0].token_ids) == 2  # what came before it is there
        assert fine.result().outputs[0].token_ids == alone
        assert llm.is_healthy
        for reason in ("close", "abort"):
            stream = llm.submit([7], params(3, "watch", 50), request_id=reason)
            next(stream)
            stream.close() if reason == "close" else llm.abort(reason)
        llm.generate([9], params(1, "watch", 2), use_tqdm=False)  # a step after the aborts
        gc.collect()
        assert [state for state in plugin.witness.states if state() is not None] == []


KERNEL_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("shape", ["compiled", "torch"])
def test_real_models_through_both_runners(shape: str, tmp_path: Path) -> None:
    reference_model(*(("Llama", KERNEL_SHAPE) if shape == "compiled" else next(iter(SHAPES.values())))).save_pretrained(tmp_path)
    prompts = [[5, 9, 11, 3], [60] * 9, [7, 8]]
    plugin = Plugin()
    plain = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    watched = plain.replace(extra_args={"witness": "watch"})
    with LLM(str(tmp_path), dtype="float32", plugins=[plugin], num_blocks=7, block_size=4) as llm:
        without = [output.outputs[0].token_ids for output in llm.generate(prompts, plain, use_tqdm=False)]
        mixed = llm.generate(prompts, [plain, watched, plain], use_tqdm=False)
        tokens = [output.outputs[0].token_ids for output in mixed]
        assert settled_snapshot(llm).num_preemptions > 0
    assert (tokens[0], tokens[2]) == (without[0], without[2])
    assert all(one != other for one, other in zip(tokens[1], tokens[1][1:], strict=False))
    assert list(plugin.witness.seen.values()) == [tokens[1][:-1]]
