"""A thinking budget closes the reasoning, by prompt or by the model's own tag, and leaves everybody else alone."""

from collections.abc import Sequence

import pytest
import torch

from minivllm_plugin import LLM, SamplingParams
from minivllm_plugin.errors import InvalidRequestError
from minivllm_plugin.extensions.logits import LogitsRow
from minivllm_plugin.extensions.requests import RequestStart, TokenView
from minivllm_plugin.structured import StructuredOutputsParams
from minivllm_plugin.structured.thinking import ThinkingBudget, ThinkingBudgetProcessor

OPEN, CLOSE = (90, 91), (95, 96, 97)
PIECES = {90: "<th", 91: "ink>", 95: "</", 96: "thi", 97: "nk>", 7: "\n"}


def decode(tokens: Sequence[int]) -> str:
    return "".join(PIECES.get(token, "x") for token in tokens)


def tokens_of(prompt: list[int], wishes: list[int], num_tokens: int, *, ask_twice: bool = False) -> list[int]:
    """What comes out when a model would like to write ``wishes``."""
    processor = ThinkingBudgetProcessor()
    value = ThinkingBudget(num_tokens, CLOSE, decode)
    start = RequestStart("r", tuple(prompt), SamplingParams(), value, {})
    written: list[int] = []
    row = LogitsRow("r", value, processor.new_state(start), tuple(prompt), TokenView(written, 0))
    for wish in wishes:
        for _ in range(2 if ask_twice else 1):
            logits = torch.zeros(1, 100)
            logits[0, wish] = 5.0
            processor.apply(logits, [row])
        written.append(int(logits.argmax()))
    return written


@pytest.mark.parametrize("ask_twice", [False, True])
def test_reasoning_that_the_prompt_opened_is_closed_after_its_budget(ask_twice: bool) -> None:
    written = tokens_of([1, 2, *OPEN], [10, 11, 12, 13, 14, 15, 16, 17], 3, ask_twice=ask_twice)
    assert written == [10, 11, 12, *CLOSE, 16, 17]


def test_reasoning_that_the_model_opens_counts_from_its_tag() -> None:
    assert tokens_of([1, 2], [*OPEN, 10, 11, 12, 13, 14, 15], 2) == [*OPEN, 10, 11, *CLOSE, 15]
    assert tokens_of([1, 2], [7, *OPEN, 10, 11, 12, 13, 14], 1) == [7, *OPEN, 10, *CLOSE, 14]  # after a line break


def test_what_ends_in_time_or_is_no_reasoning_is_left_alone() -> None:
    for prompt, wishes in (
        ([1, *OPEN], [10, *CLOSE, 11, 12, 13, 14, 15, 16]),
        ([1, *OPEN, 5, *CLOSE], [10, 11, 12, 13, 14, 15, 16]),
        ([1], [10, 11, 12, 13, *OPEN, 14, 15, 16, 17, 18]),
    ):
        assert tokens_of(prompt, wishes, 4) == wishes


def test_a_closing_tag_that_has_begun_is_finished_not_doubled() -> None:
    assert tokens_of([*OPEN], [10, 95, 96, 50, 51], 3) == [10, *CLOSE, 51]


def test_a_budget_of_nothing_closes_at_once() -> None:
    assert tokens_of([*OPEN], [10, 11, 12, 13], 0) == [*CLOSE, 13]


@pytest.mark.model
def test_the_real_model_is_cut_off_and_its_neighbours_are_not() -> None:
    with LLM("smollm2-135m") as llm:
        assert llm.tokenizer is not None
        prompt = "Question: what is 2+2?\nAnswer: <think>"
        free = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        cut = free.replace(thinking_token_budget=8)
        alone = llm.generate(prompt, free, use_tqdm=False)[0].outputs[0]
        beside, limited = (output.outputs[0] for output in llm.generate([prompt, prompt], [free, cut], use_tqdm=False))
        assert beside.token_ids == alone.token_ids
        assert limited.token_ids[:8] == alone.token_ids[:8]
        assert limited.text.find("</think>") == len(llm.tokenizer.decode(limited.token_ids[:8]))
        with pytest.raises(InvalidRequestError, match="no reasoning to limit"):
            llm.submit(prompt, cut.replace(structured_outputs=StructuredOutputsParams(regex="a+")))
