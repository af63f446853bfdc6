"""The logits processor on numbers that a test can write down; torch, but no model."""

import pytest
import torch
from minivllm_fair_share import FairShare, Settings
from minivllm_fair_share.ban_tokens import BanTokens

from minivllm_plugin import LLM, SamplingParams
from minivllm_plugin.errors import RequestFailedError
from minivllm_plugin.extensions.logits import LogitsRow
from minivllm_plugin.extensions.requests import TokenView
from minivllm_plugin.testing import LogitsRunner, scripted_llm


def row(*banned: int) -> LogitsRow:
    return LogitsRow("r", list(banned), None, (1, 2), TokenView([1, 2], 2))


def test_each_row_loses_its_own_tokens() -> None:
    logits = torch.zeros(2, 5)
    BanTokens().apply(logits, [row(1), row(0, 4)])
    assert logits.isinf().tolist() == [[False, True, False, False, False], [True, False, False, False, True]]


@pytest.mark.parametrize("value", [[], "13", [1.5], [-1], [True], None, 7])
def test_impossible_values_are_refused_before_the_request_is_queued(value: object) -> None:
    with pytest.raises(ValueError, match="token id"):
        BanTokens().validate(value, SamplingParams())


def test_a_request_that_asks_for_it_gets_none_of_them_and_its_neighbour_the_usual() -> None:
    llm, _ = scripted_llm(options={"plugins": [FairShare(Settings())]}, runner=LogitsRunner, vocab_size=20)
    plain = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    with llm:
        (usual,) = tokens(llm, plain)
        banned = sorted(set(usual[:3]))
        asked, neighbour = tokens(llm, plain.replace(extra_args={"ban_tokens": banned}), plain)
    assert neighbour == usual
    assert not set(asked) & set(banned)


def test_a_token_beyond_the_vocabulary_fails_that_request_alone() -> None:
    llm, _ = scripted_llm(options={"plugins": [FairShare(Settings())]}, runner=LogitsRunner, vocab_size=20)
    plain = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    with llm:
        bad = llm.submit([3, 4], plain.replace(extra_args={"ban_tokens": [20]}))
        good = llm.submit([3, 4], plain)
        with pytest.raises(RequestFailedError, match=r"ban_tokens.*fair-share"):
            bad.result()
        assert len(good.result().outputs[0].token_ids) == 5


def tokens(llm: LLM, *params: SamplingParams) -> list[list[int]]:
    """Completions of the same prompt under each of ``params``."""
    outputs = llm.generate([[3, 4]] * len(params), list(params), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]
