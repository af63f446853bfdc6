"""The architecture: a toy checkpoint made here gives the tokens that transformers gives, through the whole engine."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from minivllm_fair_share import FairShare, Settings
from minivllm_fair_share.plugin import read_arcee_config

from minivllm_plugin import LLM, SamplingParams
from minivllm_plugin.errors import InvalidRequestError, ModelError

PROMPTS = [[5, 9, 11, 3], [60, 2, 40, 41, 42, 43, 44, 45, 46], [7]]
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def reference() -> Any:
    """transformers' model, small and random, biases included."""
    config = transformers.ArceeConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        mlp_bias=True,
        bos_token_id=1,
        eos_token_id=96,
    )
    model = transformers.ArceeForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name else 0.0
            parameter.copy_(centre + 0.3 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.fixture(scope="module")
def llm(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    directory = tmp_path_factory.mktemp("arcee")
    reference.save_pretrained(directory)
    with LLM(
        str(directory), plugins=[FairShare(Settings())], dtype="float32", device="cpu", num_blocks=32, plugin_errors="raise"
    ) as engine:
        yield engine


@torch.inference_mode()
def expected(reference: Any, prompt: list[int], banned: tuple[int, ...] = ()) -> list[int]:
    """Greedy tokens, one full pass each."""
    tokens = list(prompt)
    for _ in range(NEW_TOKENS):
        logits = reference(torch.tensor([tokens])).logits[0, -1]
        logits[list(banned)] = float("-inf")
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def generate(llm: LLM, extra_args: dict[str, Any] | None = None) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, extra_args=extra_args)
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def test_tokens_equal_transformers(llm: LLM, reference: Any) -> None:
    assert generate(llm) == [expected(reference, prompt) for prompt in PROMPTS]


def test_banned_tokens_never_come(llm: LLM, reference: Any) -> None:
    banned = tuple(sorted({token for tokens in generate(llm) for token in tokens[:2]}))
    tokens = generate(llm, {"ban_tokens": list(banned)})
    assert tokens == [expected(reference, prompt, banned) for prompt in PROMPTS]
    assert not {token for each in tokens for token in each} & set(banned)


def test_a_bad_value_is_the_callers_error(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"ban_tokens.*fair-share"):
        generate(llm, {"ban_tokens": "comma"})


def test_without_the_plugin_the_architecture_is_unknown(llm: LLM) -> None:
    with pytest.raises(ModelError, match="ArceeForCausalLM"):
        LLM(llm.model_name, dtype="float32", device="cpu", num_blocks=32)


def test_another_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="relu2"):
        read_arcee_config({"architectures": ["ArceeForCausalLM"], "hidden_act": "gelu"})
