"""The two BPE models of llama.cpp as pipelines of the ``tokenizers`` library: byte-level and SentencePiece.

How each splits text before merging is a fact of the model family; the regular expressions are the published ones.
"""

from collections.abc import Mapping, Sequence

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from minivllm_plugin.errors import ModelLoadError, UnsupportedModelError

__all__ = ["SPLITS", "byte_level_bpe", "default_add_bos", "sentencepiece_bpe"]

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
AFTER_NUMBERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_WORDS = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + AFTER_NUMBERS
QWEN2_WORDS = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + AFTER_NUMBERS

# tokenizer.ggml.pre -> how text is split: GPT-2's way, that with single digits, Llama 3's or Qwen 2's.
SPLITS = {
    "default": "gpt2",
    "gpt-2": "gpt2",
    "gpt2": "gpt2",
    "smollm": "digits",
    "starcoder": "digits",
    "refact": "digits",
    "llama-bpe": "llama3",
    "llama3": "llama3",
    "llama-v3": "llama3",
    "qwen2": "qwen2",
    "deepseek-r1-qwen": "qwen2",
}
SPACE = "\u2581"  # SentencePiece writes a space as this block


def byte_level_bpe(vocabulary: Mapping[str, int], merges: Sequence[str], pre: str) -> Tokenizer:
    """Byte-level BPE (Radford et al. 2019): every byte is a character, so any text has tokens and comes back exactly.

    Raises:
        UnsupportedModelError: ``pre`` is not in :data:`SPLITS`.
    """
    if pre not in SPLITS:
        raise UnsupportedModelError(
            f"text splitting tokenizer.ggml.pre={pre!r} is not supported; supported are {', '.join(SPLITS)}"
        )
    pairs = [_pair(merge) for merge in merges]
    split = SPLITS[pre]
    # Llama 3 takes a whole word that is in the vocabulary as it is, even if no chain of merges leads to it.
    model = models.BPE(vocab=dict(vocabulary), merges=pairs, ignore_merges=split == "llama3")
    tokenizer = Tokenizer(model)
    if split == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(split)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece_bpe(
    vocabulary: Mapping[str, int], scores: Mapping[str, float], *, add_space_prefix: bool, unknown: str | None
) -> Tokenizer:
    """SentencePiece BPE (Kudo & Richardson 2018) with byte fallback: the pair whose union scores best is merged first."""
    merges = _merges_by_score(vocabulary, scores)
    model = models.BPE(vocab=dict(vocabulary), merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    replace = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if add_space_prefix else replace
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if add_space_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def default_add_bos(model: str, pre: str) -> bool:
    """llama.cpp's rule for files that do not say whether a text begins with BOS."""
    return model == "llama" or SPLITS.get(pre) == "llama3"


def _pre_tokenizer(split: str) -> pre_tokenizers.PreTokenizer:
    if split in ("llama3", "qwen2"):
        words = Regex(LLAMA3_WORDS if split == "llama3" else QWEN2_WORDS)
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([pre_tokenizers.Split(words, behavior="isolated"), bytes_only])
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2]) if split == "digits" else gpt2


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right:
        raise ModelLoadError(f"merge {merge!r} in the GGUF is not two tokens with a space between")
    return left, right


def _merges_by_score(vocabulary: Mapping[str, int], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Every way to join two tokens into a third, best-scored result first; ties by the ids of the halves, as Hugging Face."""
    found = [
        (-score, vocabulary[text[:cut]], vocabulary[text[cut:]], text[:cut], text[cut:])
        for text, score in scores.items()
        for cut in range(1, len(text))
        if text[:cut] in vocabulary and text[cut:] in vocabulary
    ]
    return [(left, right) for *_, left, right in sorted(found)]
