"""The tokenizer inside a GGUF as Hugging Face files: ``tokenizer.json``, ``tokenizer_config.json``, end-of-turn ids.

Two models are rebuilt exactly: byte-level BPE (``gpt2``), whose text splitting follows from ``tokenizer.ggml.pre``, and
SentencePiece BPE (``llama``), whose merges follow from the scores. Others are refused by name: a nearly right tokenizer
feeds the model other tokens than it was trained on, and nobody notices.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from minivllm_plugin.errors import ModelLoadError, UnsupportedModelError
from minivllm_plugin.models.gguf_bpe import byte_level_bpe, default_add_bos, sentencepiece_bpe

__all__ = ["GGUFTokenizer", "TokenType", "read_tokenizer"]

logger = logging.getLogger(__name__)

# What chat models end a turn with. Such a token ends the answer whatever else the metadata says.
END_OF_TURN = frozenset(
    {"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>", "<|end|>", "</s>"}
)


class TokenType(IntEnum):
    """``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class GGUFTokenizer:
    """What is written beside the weights.

    Attributes:
        tokenizer: to be saved as ``tokenizer.json``.
        config: content of ``tokenizer_config.json``.
        eos_token_ids: the end token first, then every other end-of-turn token.
        bos_token_id, pad_token_id: None when the file names none.
    """

    tokenizer: Tokenizer
    config: dict[str, Any]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None


def read_tokenizer(metadata: Mapping[str, Any]) -> GGUFTokenizer:
    """Rebuild the tokenizer.

    Raises:
        UnsupportedModelError: a tokenizer model or text splitting that is not known here; named.
        ModelLoadError: vocabulary, merges or ids are missing or contradict each other.
    """
    vocabulary = _Vocabulary.read(metadata)
    kind = metadata.get("tokenizer.ggml.model")
    try:
        if kind == "gpt2":
            tokenizer = byte_level_bpe(vocabulary.ordinary(), _strings(metadata, "merges"), _pre(metadata))
        elif kind == "llama":
            tokenizer = sentencepiece_bpe(
                vocabulary.ordinary(),
                vocabulary.scores(metadata),
                add_space_prefix=metadata.get("tokenizer.ggml.add_space_prefix", True),
                unknown=vocabulary.text(metadata, "unknown_token_id"),
            )
        else:
            raise UnsupportedModelError(f"tokenizer model {kind!r} is not supported; supported are gpt2, llama")
    except (UnsupportedModelError, ModelLoadError):
        raise
    except Exception as error:  # the tokenizers library raises bare Exception for merges that the vocabulary lacks
        raise ModelLoadError(f"the tokenizer in the GGUF is corrupt: {error}") from error
    for text, token_type in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if token_type in (TokenType.CONTROL, TokenType.UNKNOWN):
            tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False)])
        elif token_type == TokenType.USER_DEFINED:
            tokenizer.add_tokens([AddedToken(text, special=False, normalized=False)])
    bos, eos = vocabulary.id(metadata, "bos_token_id"), vocabulary.id(metadata, "eos_token_id")
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", default_add_bos(kind, _pre(metadata)))) and bos is not None
    add_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False)) and eos is not None
    _wrap(tokenizer, vocabulary.tokens, bos if add_bos else None, eos if add_eos else None)
    ends = [eos, vocabulary.id(metadata, "eot_token_id"), vocabulary.id(metadata, "eom_token_id"), *vocabulary.ends()]
    return GGUFTokenizer(
        tokenizer=tokenizer,
        config=_config(metadata, vocabulary, add_bos, add_eos),
        eos_token_ids=tuple(dict.fromkeys(token_id for token_id in ends if token_id is not None)),
        bos_token_id=bos,
        pad_token_id=vocabulary.id(metadata, "padding_token_id"),
    )


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    tokens: list[str]
    types: list[int]

    @classmethod
    def read(cls, metadata: Mapping[str, Any]) -> "_Vocabulary":
        tokens = _strings(metadata, "tokens")
        types = metadata.get("tokenizer.ggml.token_type") or [TokenType.NORMAL] * len(tokens)
        if len(types) != len(tokens):
            raise ModelLoadError(f"the GGUF has {len(tokens)} tokens but {len(types)} token types")
        # An end-of-turn token stored as ordinary text would be split and never end a turn: a known fault of converters.
        return cls(tokens, [TokenType.CONTROL if text in END_OF_TURN else kind for text, kind in zip(tokens, types, strict=True)])

    def ordinary(self) -> dict[str, int]:
        """Text -> id of every token that text can become; places that only fill up the vocabulary are left out."""
        return {text: i for i, text in enumerate(self.tokens) if self.types[i] != TokenType.UNUSED}

    def ends(self) -> list[int]:
        return [i for i, text in enumerate(self.tokens) if text in END_OF_TURN]

    def scores(self, metadata: Mapping[str, Any]) -> dict[str, float]:
        """Text -> score of the tokens that merging may produce."""
        scores = metadata.get("tokenizer.ggml.scores")
        if not isinstance(scores, list) or len(scores) != len(self.tokens):
            raise ModelLoadError("the GGUF has no score for each token (tokenizer.ggml.scores)")
        return {text: scores[i] for i, text in enumerate(self.tokens) if self.types[i] == TokenType.NORMAL}

    def id(self, metadata: Mapping[str, Any], key: str) -> int | None:
        value = metadata.get(f"tokenizer.ggml.{key}")
        if value is not None and not (isinstance(value, int) and 0 <= value < len(self.tokens)):
            raise ModelLoadError(f"tokenizer.ggml.{key} is {value!r}, outside the {len(self.tokens)} tokens of the GGUF")
        return value

    def text(self, metadata: Mapping[str, Any], key: str) -> str | None:
        token_id = self.id(metadata, key)
        return None if token_id is None else self.tokens[token_id]


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise ModelLoadError(f"the GGUF has no tokenizer.ggml.{key}")
    return value


def _pre(metadata: Mapping[str, Any]) -> str:
    name = metadata.get("tokenizer.ggml.pre")
    if name is None and metadata.get("tokenizer.ggml.model") == "gpt2":
        logger.warning("the GGUF does not say how to split text (tokenizer.ggml.pre); taking GPT-2's way. Convert it anew.")
    return "default" if name is None else str(name)


def _wrap(tokenizer: Tokenizer, tokens: list[str], bos: int | None, eos: int | None) -> None:
    """Put ``bos`` before and ``eos`` after every text, where the file asks for them."""
    if bos is None and eos is None:
        return
    before = [] if bos is None else [tokens[bos]]
    after = [] if eos is None else [tokens[eos]]
    single = [*before, "$A", *after]
    second = [f"{piece}:1" for piece in (*before, "$B", *after)]
    ends = sorted({(tokens[token_id], token_id) for token_id in (bos, eos) if token_id is not None})
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=[*single, *second], special_tokens=ends)


def _config(metadata: Mapping[str, Any], vocabulary: _Vocabulary, add_bos: bool, add_eos: bool) -> dict[str, Any]:
    special = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}
    texts = {f"{name}_token": vocabulary.text(metadata, key) for name, key in special.items()}
    texts["chat_template"] = metadata.get("tokenizer.chat_template")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: text for name, text in texts.items() if text is not None},
        "add_bos_token": add_bos,
        "add_eos_token": add_eos,
        "clean_up_tokenization_spaces": False,
    }
