"""The tokenizer rebuilt from GGUF metadata: splitting by family, control tokens, BOS and SentencePiece merges."""

import itertools
import random
from typing import Any

import pytest
from tiny_gguf import MERGES, TOKENS, TYPES

from minivllm_plugin.errors import ModelLoadError, UnsupportedModelError
from minivllm_plugin.models.gguf_tokenizer import GGUFTokenizer, TokenType, read_tokenizer


def bpe(**changes: Any) -> GGUFTokenizer:
    fields = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": TOKENS,
        "token_type": TYPES,
        "merges": MERGES,
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | changes
    return read_tokenizer({f"tokenizer.ggml.{key}": value for key, value in fields.items() if value is not None})


def ids(tokens: GGUFTokenizer, text: str) -> list[int]:
    return list(tokens.tokenizer.encode(text).ids)


def names(tokens: GGUFTokenizer, text: str) -> list[str]:
    return list(tokens.tokenizer.encode(text).tokens)


GPT2_PIECES = ["don", "'t", " stop", " 12345", " X", "!!", "\n\n \n", " y"]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", GPT2_PIECES),
        ("default", GPT2_PIECES),
        ("smollm", ["don", "'t", " stop", " ", *"12345", " X", "!!", "\n\n \n", " y"]),
        ("llama-bpe", ["don", "'t", " stop", " ", "123", "45", " X", "!!\n\n", " \n", " y"]),
        ("qwen2", ["don", "'t", " stop", " ", *"12345", " X", "!!\n\n", " \n", " y"]),
    ],
)
def test_text_is_split_as_the_family_does(pre: str, pieces: list[str]) -> None:
    text = "don't stop 12345 X!!\n\n \n y"
    splitter = bpe(pre=pre).tokenizer.pre_tokenizer
    assert splitter is not None
    assert [text[start:end] for _, (start, end) in splitter.pre_tokenize_str(text)] == pieces


def test_qwen2_composes_characters_and_others_do_not() -> None:
    assert bpe(pre="qwen2").tokenizer.normalizer is not None
    assert bpe(pre="llama-bpe").tokenizer.normalizer is None


def test_llama3_takes_a_whole_word_of_the_vocabulary() -> None:
    """'cab' is a token that no merge leads to: only a tokenizer with ignore_merges finds it."""
    tokens = [*TOKENS, "cab"]
    extra = {"tokens": tokens, "token_type": [*TYPES, 1], "add_bos_token": False}
    assert names(bpe(pre="llama-bpe", **extra), "cab") == ["cab"]
    assert names(bpe(pre="gpt-2", **extra), "cab") == ["c", "ab"]


def test_control_and_user_defined_tokens_stay_one_id() -> None:
    tokens = bpe()
    assert names(tokens, "ab<|im_end|>c<tool>abc<s>") == ["ab", "<|im_end|>", "c", "<tool>", "abc", "<s>"]
    assert tokens.tokenizer.decode(ids(tokens, "ab<|im_end|><tool>")) == "ab<tool>"  # a user-defined token is text
    tokens.tokenizer.encode_special_tokens = True
    assert "<|im_end|>" not in names(tokens, "a<|im_end|>")
    assert "<tool>" in names(tokens, "a<tool>")


def test_an_end_of_turn_token_marked_as_text_is_a_control_token() -> None:
    tokens = bpe(token_type=[2, 3, 1, 4, *TYPES[4:]], eos_token_id=1)
    assert names(tokens, "a<|im_end|>") == ["a", "<|im_end|>"]
    assert tokens.eos_token_ids == (1, 2)


def test_all_end_of_turn_ids() -> None:
    texts = [*TOKENS, "<|eot_id|>", "<|eom_id|>", "<other>"]
    types = [*TYPES, 3, 3, 3]
    tokens = bpe(tokens=texts, token_type=types, eot_token_id=len(TOKENS) + 2)
    assert set(tokens.eos_token_ids) == {2, len(TOKENS), len(TOKENS) + 1, len(TOKENS) + 2}
    assert tokens.eos_token_ids[0] == 2


def test_unused_places_are_not_text() -> None:
    tokens = bpe(tokens=[*TOKENS, "[PAD]"], token_type=[*TYPES, TokenType.UNUSED])
    assert tokens.tokenizer.token_to_id("[PAD]") is None


@pytest.mark.parametrize(
    ("changes", "bos"),
    [
        ({"add_bos_token": True}, 1),
        ({"add_bos_token": False}, 0),
        ({}, 0),
        ({"pre": "llama-bpe"}, 1),
        ({"pre": "llama-bpe", "add_bos_token": False}, 0),
        ({"add_bos_token": True, "bos_token_id": None}, 0),
    ],
)
def test_bos_where_the_file_asks_for_it(changes: dict[str, Any], bos: int) -> None:
    tokens = bpe(**changes)
    assert ids(tokens, "ab").count(1) == bos
    assert tokens.config["add_bos_token"] == bool(bos)
    assert ids(tokens, "ab")[bos:] == [TOKENS.index("ab")]
    assert tokens.tokenizer.encode("ab", add_special_tokens=False).ids == [TOKENS.index("ab")]


def test_eos_after_the_text_where_the_file_asks_for_it() -> None:
    assert ids(bpe(add_eos_token=True, add_bos_token=True), "ab") == [1, TOKENS.index("ab"), 2]


def test_the_template_and_the_names_of_special_tokens() -> None:
    tokens = read_tokenizer(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": TOKENS,
            "tokenizer.ggml.token_type": TYPES,
            "tokenizer.ggml.merges": MERGES,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0,
            "tokenizer.chat_template": "{{ messages }}",
        }
    )
    assert tokens.config["chat_template"] == "{{ messages }}"
    assert tokens.config["eos_token"] == "<|im_end|>"
    assert tokens.config["unk_token"] == "<unk>"
    assert "bos_token" not in tokens.config


def test_a_file_without_its_way_of_splitting_is_announced(caplog: pytest.LogCaptureFixture) -> None:
    bpe(pre=None)
    assert "tokenizer.ggml.pre" in caplog.text


def test_refusals() -> None:
    with pytest.raises(UnsupportedModelError, match="'bert'"):
        bpe(model="bert")
    with pytest.raises(UnsupportedModelError, match="'gpt-4o'"):
        bpe(pre="gpt-4o")
    with pytest.raises(ModelLoadError, match="scores"):
        bpe(model="llama")


# SentencePiece

PIECES = [
    "<unk>",
    "<s>",
    "</s>",
    *(f"<0x{byte:02X}>" for byte in range(256)),
    *"▁abcd",
    "▁a",
    "ab",
    "cd",
    "▁ab",
    "abcd",
    "▁abcd",
    "bc",
    "da",
]
PIECE_TYPES = [2, 3, 3, *([6] * 256), *([1] * (len(PIECES) - 259))]
# Single characters score lowest; the merged ones in an order that is neither by length nor by id.
SCORES = [0.0] * 259 + [-100.0 - i for i in range(5)] + [-3.0, -1.0, -6.0, -2.0, -5.0, -4.0, -1.5, -7.0]


def sentencepiece(**changes: Any) -> GGUFTokenizer:
    return bpe(
        **{"model": "llama", "pre": "default", "tokens": PIECES, "token_type": PIECE_TYPES, "scores": SCORES, "merges": None,
           "unknown_token_id": 0, "add_bos_token": False}
        | changes
    )  # fmt: skip


def merged_by_score(text: str) -> list[str]:
    """SentencePiece's own procedure: while some neighbours join to a piece, join the pair with the best score, leftmost first."""
    scores = {piece: SCORES[i] for i, piece in enumerate(PIECES) if PIECE_TYPES[i] == 1}
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [(scores[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in scores]
        if not pairs:
            break
        at = -max(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    return [piece for s in symbols for piece in ([s] if s in scores else [f"<0x{b:02X}>" for b in s.encode()])]


def test_sentencepiece_merges_as_its_own_procedure_does() -> None:
    tokens, generator = sentencepiece(), random.Random(0)
    for _ in range(500):
        text = "".join(generator.choices("abcd é\n", k=generator.randrange(1, 14)))
        assert names(tokens, text) == merged_by_score(text), text
        assert tokens.tokenizer.decode(ids(tokens, text)) == text


def test_sentencepiece_prefix_space_and_bos() -> None:
    assert names(sentencepiece(add_bos_token=None), "abcd") == ["<s>", "▁abcd"]
    assert names(sentencepiece(add_space_prefix=False), "abcd") == ["abcd"]
    without = sentencepiece(add_space_prefix=False)
    assert without.tokenizer.decode(ids(without, " ab")) == " ab"
