"""Logits processors on one batch of tensors: order, company, and failures that stay with their own row."""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from minivllm_plugin import SamplingParams
from minivllm_plugin.engine.sequence import FAILED_TOKEN
from minivllm_plugin.engine.sequence import Sequence as EngineSequence
from minivllm_plugin.extensions.logits import LogitsProcessorRegistry, LogitsRow
from minivllm_plugin.extensions.logits_pipeline import LogitsPipeline
from minivllm_plugin.runner.sampler import sample

VOCAB = 23


class Processor:
    """Records its calls, and does to the logits what it is told to."""

    argmax_invariant = False

    def __init__(self, act: Callable[[Tensor, Sequence[LogitsRow]], Any], state: Any = None, **attributes: Any) -> None:
        self.act, self.state = act, state
        self.calls: list[tuple[str, ...]] = []
        vars(self).update(attributes)

    def validate(self, value: Any, params: SamplingParams) -> None:
        return None

    def new_state(self, request: Any) -> Any:
        return self.state

    def apply(self, logits: Tensor, rows: Sequence[LogitsRow]) -> Any:
        assert logits.dtype == torch.float32
        assert logits.shape == (len(rows), VOCAB)
        self.calls.append(tuple(row.request_id for row in rows))
        return self.act(logits, rows)


def pipeline(**processors: Any) -> LogitsPipeline:
    registry = LogitsProcessorRegistry()
    with registry.owned_by("acme"):
        for name, processor in processors.items():
            registry.add(name, processor)
    return LogitsPipeline(registry)


def sequence(name: str, *completion: int, **params: Any) -> EngineSequence:
    seq = EngineSequence([3, 1, 4], sampling_params=SamplingParams(**{"temperature": 0.0, **params}), request_id=name)
    for token in completion:
        seq.append_token(token)
    return seq


def random_logits(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def force(logits: Tensor, rows: Sequence[LogitsRow]) -> None:
    """Each row's value is its next token."""
    for row, entry in zip(logits, rows, strict=True):
        row[entry.value] = 100.0


def test_rows_without_a_state_come_together_once_a_step_and_others_are_not_touched() -> None:
    forcing = Processor(force)
    processors = pipeline(force=forcing)
    seqs = [sequence("a"), sequence("b", extra_args={"force": 7}), sequence("c", extra_args={"force": 9}), sequence("d")]
    logits = random_logits(4)
    plain = sample(logits.clone(), seqs, ())
    changed = logits.clone()
    assert sample(changed, seqs, (), processors) == [plain[0], 7, 9, plain[3]]
    assert forcing.calls == [("b", "c")]
    assert torch.equal(changed[[0, 3]], logits[[0, 3]])
    assert all(seq.failure is None for seq in seqs)


def test_a_returned_tensor_counts_as_well_as_a_change_in_place() -> None:
    processors = pipeline(minus=Processor(lambda logits, rows: -logits))
    seqs = [sequence("a", extra_args={"minus": 1}), sequence("b")]
    logits = random_logits(2)
    assert sample(logits.clone(), seqs, (), processors) == [int(logits[0].argmin()), int(logits[1].argmax())]
    assert (
        pipeline(half=Processor(lambda logits, rows: logits.double())).apply(logits, [sequence("a", extra_args={"half": 1})])
        is None
    )


def test_the_order_is_that_of_registration_after_min_tokens_and_before_temperature() -> None:
    seen: list[Tensor] = []

    def double(logits: Tensor, rows: Any) -> Tensor:
        seen.append(logits.clone())
        return logits * 2

    def add(logits: Tensor, rows: Any) -> Tensor:
        return logits + 1

    processors = pipeline(double=Processor(double), add=Processor(add))
    seqs = [sequence("a", temperature=0.5, seed=1, min_tokens=1, extra_args={"add": 1, "double": 1})]
    logits = random_logits(1)
    processed = logits.clone()
    sample(processed, seqs, (5,), processors)
    assert seen[0][0, 5] == -math.inf  # the end token is held back already
    logits[0, 5] = -math.inf
    assert torch.equal(seen[0], logits)  # not divided by the temperature
    assert torch.equal(processed, logits * 2 + 1)  # the order of registration, not of extra_args


def test_random_rows_are_drawn_from_what_processors_left() -> None:
    def only_even(logits: Tensor, rows: Any) -> None:
        logits[:, 1::2] = -math.inf

    processors = pipeline(even=Processor(only_even))
    tokens = [
        sample(torch.zeros(1, VOCAB), [sequence("a", temperature=1.0, seed=seed, extra_args={"even": 1})], (), processors)[0]
        for seed in range(100)
    ]
    assert {token % 2 for token in tokens} == {0}
    assert len(set(tokens)) > 5


def raise_for(name: str) -> Callable[[Tensor, Sequence[LogitsRow]], None]:
    def act(logits: Tensor, rows: Sequence[LogitsRow]) -> None:
        logits += 1.0  # half done when it fails
        if any(row.request_id == name for row in rows):
            raise RuntimeError("no such grammar")

    return act


def bad_rows(name: str, value: float) -> Callable[[Tensor, Sequence[LogitsRow]], None]:
    def act(logits: Tensor, rows: Sequence[LogitsRow]) -> None:
        logits += 1.0
        for row, entry in zip(logits, rows, strict=True):
            if entry.request_id == name:
                row[:] = value if value == -math.inf else row
                row[3] = value

    return act


FAILURES: dict[str, tuple[Callable[[Tensor, Sequence[LogitsRow]], Any], str]] = {
    "raises": (raise_for("b"), "RuntimeError: no such grammar"),
    "nan": (bad_rows("b", math.nan), "it made a logit NaN"),
    "inf": (bad_rows("b", math.inf), r"it made a logit \+inf"),
    "masks all": (bad_rows("b", -math.inf), "it left no token"),
    "shape": (
        lambda logits, rows: logits[:, 1:] + 1.0 if any(row.request_id == "b" for row in rows) else logits + 1.0,
        r"shape \[1, 23\] into \[1, 22\]",
    ),
    "no tensor": (
        lambda logits, rows: 5 if any(row.request_id == "b" for row in rows) else logits + 1.0,
        "must return None or a tensor",
    ),
}


@pytest.mark.parametrize("state", [None, "some"])
@pytest.mark.parametrize("repeatable", [False, True])
@pytest.mark.parametrize("failure", FAILURES)
def test_a_failing_row_fails_alone(failure: str, repeatable: bool, state: Any, caplog: pytest.LogCaptureFixture) -> None:
    act, message = FAILURES[failure]
    asked = {"extra_args": {"bad": 1}}
    seqs = [sequence("a", **asked), sequence("b", **asked), sequence("c"), sequence("d", temperature=0.7, seed=3, **asked)]
    logits = random_logits(4)
    plus_one = pipeline(bad=Processor(lambda logits, rows: logits + 1.0))
    others = [
        sequence(seq.request_id or "", **params)
        for seq, params in zip(seqs, [asked, asked, {}, {**asked, "temperature": 0.7, "seed": 3}], strict=True)
    ]
    expected = sample(logits.clone(), others, (), plus_one)
    with caplog.at_level(logging.WARNING):
        tokens = sample(logits, seqs, (), pipeline(bad=Processor(act, state, repeatable=repeatable)))
    assert tokens == [expected[0], FAILED_TOKEN, *expected[2:]]
    assert [seq.failure is None for seq in seqs] == [True, False, True, True]
    [record] = [record for record in caplog.records if record.name.startswith("minivllm_plugin.extensions")]
    assert "request 'b'" in record.message
    assert seqs[1].failure is not None
    with pytest.raises(AssertionError, match=f"logits processor 'bad' of plugin 'acme' failed: .*{message}"):
        raise AssertionError(seqs[1].failure)


def test_a_failed_row_is_not_given_to_the_processors_after_it() -> None:
    second = Processor(lambda logits, rows: None)
    processors = pipeline(first=Processor(raise_for("a")), second=second)
    asked = {"extra_args": {"first": 1, "second": 1}}
    assert sample(random_logits(2), [sequence("a", **asked), sequence("b", **asked)], (), processors)[0] == FAILED_TOKEN
    assert second.calls == [("b",)]


def test_a_state_that_cannot_be_made_fails_its_request() -> None:
    class Unmade(Processor):
        def new_state(self, request: Any) -> Any:
            raise LookupError(f"no grammar {request.value}")

    processors = pipeline(unmade=Unmade(force))
    seqs = [sequence("a", extra_args={"unmade": 5}), sequence("b")]
    logits = random_logits(2)
    assert sample(logits.clone(), seqs, (), processors) == [FAILED_TOKEN, int(logits[1].argmax())]
    assert seqs[0].failure == "logits processor 'unmade' of plugin 'acme' failed: LookupError: no grammar 5"


def test_logits_that_came_in_bad_are_not_a_processors_fault() -> None:
    logits = random_logits(3)
    logits[0, 2] = math.nan
    logits[1] = -math.inf
    seqs = [sequence(name, extra_args={"same": 1}) for name in "abc"]
    for act in (lambda logits, rows: logits + 0.0, lambda logits, rows: None):
        assert sample(logits.clone(), seqs, (), pipeline(same=Processor(act))) == [FAILED_TOKEN] * 2 + [int(logits[2].argmax())]
    assert [seq.failure for seq in seqs] == [None] * 3


def test_rows_with_a_state_come_one_by_one_unless_the_processor_is_repeatable() -> None:
    def states(repeatable: bool, state: Any) -> list[tuple[str, ...]]:
        processor = Processor(lambda logits, rows: None, state, repeatable=repeatable)
        sample(random_logits(3), [sequence(name, extra_args={"p": 1}) for name in "abc"], (), pipeline(p=processor))
        return processor.calls

    assert states(repeatable=False, state=None) == [("a", "b", "c")]
    assert states(repeatable=True, state="some") == [("a", "b", "c")]
    assert states(repeatable=False, state="some") == [("a",), ("b",), ("c",)]


def test_argmax_invariant_processors_are_skipped_for_greedy_rows_only() -> None:
    invariant = Processor(lambda logits, rows: None, argmax_invariant=True)
    variant = Processor(lambda logits, rows: None)
    processors = pipeline(scale=invariant, bias=variant)
    seqs = [
        sequence("greedy", extra_args={"scale": 1}),
        sequence("random", temperature=1.0, extra_args={"scale": 1}),
        sequence("both", extra_args={"scale": 1, "bias": 1}),
    ]
    sample(random_logits(3), seqs, (), processors)
    assert invariant.calls == [("random", "both")]
    assert variant.calls == [("both",)]


def test_rows_show_prompt_completion_and_value() -> None:
    seen: list[tuple[Any, ...]] = []

    def look(logits: Tensor, rows: Sequence[LogitsRow]) -> None:
        seen.extend((row.value, row.prompt_token_ids, list(row.output_token_ids), id(row)) for row in rows)

    processors = pipeline(look=Processor(look))
    seq = sequence("a", extra_args={"look": "v"})
    for token in (7, 8):
        sample(random_logits(1), [seq], (), processors)
        seq.append_token(token)
    sample(random_logits(1), [seq], (), processors)
    assert [entry[:3] for entry in seen] == [("v", (3, 1, 4), []), ("v", (3, 1, 4), [7]), ("v", (3, 1, 4), [7, 8])]
    assert len({entry[3] for entry in seen}) == 1


def test_the_view_of_the_completion_is_a_sequence() -> None:
    seq = sequence("a", 5, 6, 7, 8)
    from minivllm_plugin.extensions.requests import TokenView

    view = TokenView(seq.token_ids, seq.num_prompt_tokens)
    plain = [5, 6, 7, 8]
    assert (len(view), view[0], view[-1], list(view), 6 in view, view.index(7)) == (4, 5, 8, plain, True, 2)
    for part in (
        slice(None),
        slice(-2, None),
        slice(1, 3),
        slice(None, None, -1),
        slice(3, 0, -2),
        slice(10, 20),
        slice(-9, 2),
        slice(3, 1),
    ):
        assert view[part] == plain[part], part
    for index in (4, -5):
        with pytest.raises(IndexError):
            view[index]
    assert view == plain
    assert view == tuple(plain)
    assert view != [5]
    assert not TokenView([1, 2], 2)
