"""Small tokenizers of every family, built in memory; no file and no network is needed."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

CORPUS = [
    "the quick brown fox jumps over the lazy dog and then the dog sleeps",
    "user assistant system tool hello world weather in Paris {'name': 'get_weather'} you are a helpful assistant",
    "žluťoučký kůň úpěl ďábelské ódy 🌶 שלום こんにちは 123 + 456 = 579",
] * 3
CONTROL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # one token each, but not special: as in Qwen3
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_per_token(special: Sequence[str] = CONTROL) -> Backend:
    """Byte-level, without merges: every byte of a text is one token."""
    backend = Backend(models.BPE(vocab=_byte_alphabet(), merges=[]))
    return _byte_level(backend, special)


def trained_byte_level(vocab_size: int = 400) -> Backend:
    """Byte-level BPE with real merges, control tokens and non-special markup, as Qwen and SmolLM2 have it."""
    backend = _byte_level(Backend(models.BPE()), ())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens(list(CONTROL))
    backend.add_tokens([AddedToken(text, normalized=False) for text in MARKUP])
    return backend


def letter_groups() -> Backend:
    """The vocabulary of trial C01: ABC, DEF, AB, X and an end token."""
    backend = Backend(models.BPE(vocab={"ABC": 0, "DEF": 1, "AB": 2, "X": 3}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return backend


def sentencepiece(*, strip: bool = True, byte_fallback: bool = True) -> Backend:
    """Llama 2 style: ``▁`` for a space, ``<0xE2>`` for a byte, one leading space taken off at the beginning of a text."""
    words = ["▁Hello", "▁world", "▁", "▁▁", "lo", "a", "b", "c", "<", ">", "s", "/", "|", "é", "▁the"]
    vocab = {text: index for index, text in enumerate(["<unk>", "<s>", "</s>", *BYTES, *words])}
    model = models.BPE(vocab=vocab, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=byte_fallback)
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def unigram() -> Backend:
    """Unigram with a Metaspace decoder; its control tokens stand in the vocabulary, as converters write them."""
    pieces = ["<unk>", "<s>", "</s>", "▁Hello", "▁world", "▁", "▁a▁b", *"abcdehlorsw<>/|é"]
    backend = Backend(models.Unigram([(piece, -float(len(pieces) - len(piece))) for piece in pieces], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    backend.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def wordpiece() -> Backend:
    """A decoder that looks at token edges, so that only a window of tokens can decode it."""
    words = ["[UNK]", "hello", "world", "##s", "##ing", "good", "bye", "."]
    backend = Backend(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    backend.add_special_tokens(["[UNK]"])
    return backend


def words() -> Backend:
    """No decoder at all: tokens are joined by spaces."""
    backend = Backend(models.WordLevel({"[UNK]": 0, "one": 1, "two": 2, "three": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return backend


def with_bos(backend: Backend, bos: str = "<s>") -> Backend:
    """Let the post-processor put BOS before every text."""
    token_id = backend.token_to_id(bos)
    backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, token_id)])
    return backend


def save(backend: Backend, directory: Path, config: Mapping[str, Any] | None = None, **files: Mapping[str, Any]) -> Path:
    """Write a model directory: ``tokenizer.json``, ``tokenizer_config.json``, ``config.json`` and any ``name=`` JSON file."""
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", **(config or {})}
    contents = {"tokenizer_config": tokenizer_config, "config": {"model_type": "llama"}, **files}
    for name, content in contents.items():
        (directory / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return directory


def _byte_alphabet() -> dict[str, int]:
    return {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}


def _byte_level(backend: Backend, special: Sequence[str]) -> Backend:
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    return backend
