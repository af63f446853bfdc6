"""The real tokenizer of SmolLM2 against a byte-level BPE written out and against transformers."""

import itertools
import re
import unicodedata
from pathlib import Path

import pytest
import regex
from tokenizers import Tokenizer

from minivllm_plugin.models.gguf import convert

CORPUS = [
    "Hello, world! It's 2024; we'll see 3.14159 and 1,000,000.",
    "  leading, trailing  \n\n\ttabs\r\nand   runs   of    spaces ",
    "def f(x):\n    return {'a': [1, 22, 333], \"b\": x**2}  # comment\n",
    "déjà vu, naïve, Ελληνικά, Русский, 中文字符, 日本語のテキスト, عربى, हिन्दी",
    "e\u0301 (decomposed) \u200d zero width, \u00a0 no-break, \ufeff mark",
    "emoji 🤗🚀👩‍👩‍👧‍👦 ✨ end",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|>",
    "https://example.org/a_b-c?d=e&f=%20#g I'M they'RE y'all'd've",
    "\x00\x01\x7f \\n \\u1234 $£€ ½²³ ①Ⅷ ٣",
    "",
]


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(smollm2_gguf, tmp_path_factory.mktemp("converted"))


@pytest.mark.model
def test_smollm2_text_comes_back_exactly(smollm2: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    for text in CORPUS:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.model
def test_smollm2_control_tokens_are_single_ids(smollm2: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    for expected, text in enumerate(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<reponame>", "<file_sep>"]):
        assert tokenizer.encode(f"a{text}b").ids[1:-1] == [expected]
    assert tokenizer.get_vocab_size() == 49152


@pytest.mark.model
def test_smollm2_equals_a_plain_bpe(smollm2: Path, smollm2_gguf: Path) -> None:
    """The same ids as byte-level BPE written out: digits apart, GPT-2's expression, then the merges in order."""
    from gguf import GGUFReader

    reader = GGUFReader(smollm2_gguf)
    vocabulary = {text: i for i, text in enumerate(reader.fields["tokenizer.ggml.tokens"].contents())}
    ranks = {tuple(merge.split(" ")): i for i, merge in enumerate(reader.fields["tokenizer.ggml.merges"].contents())}
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    for text in CORPUS:
        assert tokenizer.encode(text).ids == [vocabulary[piece] for piece in plain_bpe(text, ranks)], text


@pytest.mark.model
def test_smollm2_equals_transformers(smollm2: Path) -> None:
    import transformers

    ours, theirs = Tokenizer.from_file(str(smollm2 / "tokenizer.json")), transformers.AutoTokenizer.from_pretrained(smollm2)
    for text in CORPUS:
        assert ours.encode(text).ids == theirs(text).input_ids, text
    assert (theirs.eos_token, theirs.bos_token, theirs.pad_token) == ("<|im_end|>", "<|im_start|>", "<|im_end|>")
    assert theirs.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False).count("<|im_start|>") == 2


GPT2_WORDS = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def byte_characters() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def plain_bpe(text: str, ranks: dict[tuple[str, ...], int]) -> list[str]:
    characters, out = byte_characters(), []
    for part in re.split(r"(<\|im_start\|>|<\|im_end\|>|<\|endoftext\|>)", text):
        if part.startswith("<|"):
            out.append(part)
            continue
        for run in regex.split(r"(\p{N})", part):  # the library's Digits splits off every character that is numeric
            for word in [run] if regex.fullmatch(r"\p{N}", run) else GPT2_WORDS.findall(run):
                symbols = [characters[byte] for byte in word.encode()]
                while True:
                    pairs = [(ranks[pair], i) for i, pair in enumerate(itertools.pairwise(symbols)) if pair in ranks]
                    if not pairs:
                        break
                    at = min(pairs)[1]
                    symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
                out += symbols
    return out


def test_the_corpus_has_what_it_claims() -> None:
    joined = "".join(CORPUS)
    kinds = {unicodedata.category(character) for character in joined}
    assert {"Nd", "No", "Nl", "Mn", "Cf", "So", "Cc", "Lo"} <= kinds
