"""Control tokens: which texts they have, and how to encode a text in which only *some* of them are meant.

A rendered chat holds real control tokens (the template's) and text that merely looks like one (a user's). The encoder
here is a copy of the tokenizer in which every special token goes by a secret alias: the real ones are renamed before
encoding, everything else can only become plain text, and spacing rules at the seams stay the library's own. Building it
costs as much as loading the tokenizer, so the owner does it on first need.
"""

import json
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

__all__ = ["AliasedEncoder", "ControlTokens"]

# Plane-16 private use: no text means anything by it, and no regular expression of a pre-tokenizer treats it as a word.
ALIAS_OPEN, ALIAS_CLOSE = "\U0010fff0", "\U0010fff1"


@dataclass(frozen=True, slots=True)
class ControlTokens:
    """The texts of all control tokens of one tokenizer.

    Attributes:
        pattern: matches any of them the way the tokenizer does: leftmost, then longest. Without tokens it never matches.
        beginnings: every proper prefix of one; text that ends so could become a token with what follows it.
        endings: every proper suffix of one.
    """

    pattern: re.Pattern[str]
    beginnings: tuple[str, ...]
    endings: tuple[str, ...]

    @classmethod
    def of(cls, tokens: Iterable[AddedToken]) -> "ControlTokens":
        longest_first = sorted(tokens, key=lambda token: len(token.content), reverse=True)
        alternatives = []
        for token in longest_first:
            text = re.escape(token.content)
            alternatives.append(rf"(?<!\w){text}(?!\w)" if token.single_word else text)
        cuts = [(token.content, cut) for token in longest_first for cut in range(1, len(token.content))]
        return cls(
            pattern=re.compile("|".join(alternatives) or "(?!)"),
            beginnings=tuple({text[:cut] for text, cut in cuts}),
            endings=tuple({text[cut:] for text, cut in cuts}),
        )

    def count(self, text: str) -> int:
        """How many control tokens ``text`` holds."""
        return sum(1 for _ in self.pattern.finditer(text))


class AliasedEncoder:
    """Encodes text whose real control tokens were renamed by :meth:`rename`. Read-only after construction."""

    def __init__(self, backend: Backend, special_tokens: Mapping[int, AddedToken], pattern: re.Pattern[str]) -> None:
        secret = secrets.token_hex(8)  # nobody can type an alias
        self._alias = {
            token.content: f"{ALIAS_OPEN}{secret}x{token_id:x}{ALIAS_CLOSE}" for token_id, token in special_tokens.items()
        }
        self._pattern = pattern
        self._backend = Backend.from_str(json.dumps(_rename_everywhere(json.loads(backend.to_str()), self._alias)))
        self._backend.no_truncation()
        self._backend.no_padding()

    def rename(self, text: str) -> str:
        """``text`` with every control token replaced by its alias."""
        return self._pattern.sub(lambda match: self._alias[match.group()], text)

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``: aliases become their control tokens, all else plain text (which may look like one)."""
        return self._backend.encode(text, add_special_tokens=False).ids


def _rename_everywhere(data: dict[str, Any], alias: Mapping[str, str]) -> dict[str, Any]:
    """``tokenizer.json`` with the special tokens renamed in the added tokens and, where they occur, in the vocabulary."""
    for token in data["added_tokens"]:
        token["content"] = alias.get(token["content"], token["content"])
    model = data["model"]
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        renamed = [text for text in alias if text in vocab]
        for text in renamed:
            vocab[alias[text]] = vocab.pop(text)
    else:  # Unigram: [[piece, score], …], the position is the id
        renamed = [entry[0] for entry in vocab if entry[0] in alias]
        for entry in vocab:
            entry[0] = alias.get(entry[0], entry[0])
    if model.get("unk_token") in alias:
        model["unk_token"] = alias[model["unk_token"]]
    if renamed and model.get("merges"):
        gone = set(renamed)
        model["merges"] = [merge for merge in model["merges"] if gone.isdisjoint(_merge_parts(merge))]
    data["post_processor"] = None  # it would name tokens that are gone; nothing is added here anyway
    return data


def _merge_parts(merge: str | list[str]) -> tuple[str, str, str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right, left + right
