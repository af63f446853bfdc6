"""Text to token ids and back, for one model directory.

Built on the ``tokenizers`` library from ``tokenizer.json`` (imports in milliseconds; neither torch nor transformers);
directories without that file go through transformers' ``AutoTokenizer`` once. After construction nothing is changed any
more, so any number of threads may encode and decode at the same time. Chat templates are only carried here, not
understood: see :mod:`minivllm_plugin.serving.chat`.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from minivllm_plugin.errors import InvalidRequestError, ModelLoadError
from minivllm_plugin.serving.control_tokens import AliasedEncoder, ControlTokens
from minivllm_plugin.serving.token_text import PieceTable, TextStream
from minivllm_plugin.serving.tokenizer_files import DEFAULT_TEMPLATE, TokenizerSettings, read_settings

__all__ = ["Tokenizer"]

NO_IDS: frozenset[int] = frozenset()


class Tokenizer:
    """A vocabulary with its special tokens, end tokens and chat templates.

    Attributes:
        vocab_size: number of tokens, added ones included. A model may have more rows (padding).
        bos_token_id: the begin-of-text token, or None.
        eos_token_ids: every token that ends a completion: the tokenizer's own and those of both configuration files.
        special_ids: ids of all control tokens.
        named_tokens: ``bos_token``, ``eos_token`` … to their text, as a chat template sees them.
        chat_templates: template name to Jinja text.
        chat_template: the default one, or None.
        control_tokens: the texts of all control tokens.
    """

    def __init__(self, backend: Backend, settings: TokenizerSettings | None = None) -> None:
        """Take over ``backend`` (it is changed: missing special tokens are added, truncation and padding are switched off)."""
        settings = settings or TokenizerSettings()
        _complete(backend, settings)
        self._backend = backend
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.named_tokens: Mapping[str, str] = dict(settings.named_tokens)
        self._special_tokens: dict[int, AddedToken] = {
            token_id: token for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        }
        self.special_ids: frozenset[int] = frozenset(self._special_tokens)
        self.control_tokens = ControlTokens.of(self._special_tokens.values())
        bos = self._id_of("bos_token")
        self.bos_token_id: int | None = settings.bos_token_id if bos is None else bos
        eos = self._id_of("eos_token")
        own_eos = () if eos is None else (eos,)
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys((*own_eos, *settings.eos_token_ids)))
        self.chat_templates: Mapping[str, str] = dict(settings.chat_templates)
        # What the tokenizer puts around a text; the flag counts only where its post-processor says nothing.
        frame = backend.encode("", add_special_tokens=True).ids
        self._post_processor_adds_bos = bool(frame) and frame[0] == self.bos_token_id
        self._flag_adds_bos = settings.add_bos_token and not self._post_processor_adds_bos and self.bos_token_id is not None
        self._pieces = PieceTable(backend)
        self._aliased: AliasedEncoder | None = None
        self._aliased_lock = threading.Lock()

    @classmethod
    def load(cls, directory: Path | str) -> "Tokenizer":
        """Read the tokenizer of a model directory.

        Raises:
            ModelLoadError: there is no tokenizer, or one of its files is corrupt (the message names the file).
        """
        directory = Path(directory)
        settings = read_settings(directory)
        path = directory / "tokenizer.json"
        if not path.exists():
            return cls(_load_with_transformers(directory), settings)
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every kind of damage
            raise ModelLoadError(f"{path} is not a readable tokenizer ({error}); fetch the model's files again") from error
        return cls(backend, settings)

    @property
    def chat_template(self) -> str | None:
        """The template used for plain chats; None when the model brings none."""
        if len(self.chat_templates) == 1:
            return next(iter(self.chat_templates.values()))
        return self.chat_templates.get(DEFAULT_TEMPLATE)

    def to_json(self) -> str:
        """The whole vocabulary in the format of ``tokenizer.json``, with what was added from the side files."""
        return self._backend.to_str()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of raw text. Control tokens written in it are parsed.

        With ``add_special_tokens`` what the tokenizer asks for is put around it: one BOS if its post-processor or its
        ``add_bos_token`` says so. A text that already begins with BOS gets no second one.

        Raises:
            InvalidRequestError: not a string, or a string with lone surrogates.
        """
        ids = self._encode(text, add_special_tokens)
        if not add_special_tokens or self.bos_token_id is None:
            return ids
        if self._post_processor_adds_bos and ids[1:2] == [self.bos_token_id]:
            return ids[1:]
        if self._flag_adds_bos and ids[:1] != [self.bos_token_id]:
            return [self.bos_token_id, *ids]
        return ids

    def encode_rendered(self, text: str, literals: Mapping[str, str] | None = None, joint: str = "") -> list[int]:
        """Token ids of a rendered chat: nothing is added, control tokens are parsed, user text stays text.

        Args:
            text: the rendered template.
            literals: placeholder character in ``text`` to the text it stands for, which is encoded as plain text.
            joint: a character that marks seams between template and user text; it is dropped, and no control token is
                recognised across it.
        """
        whole = text.replace(joint, "") if joint else text
        if not literals and (whole == text or self.control_tokens.count(whole) == self.control_tokens.count(text)):
            return self._encode(whole, False)
        encoder = self._aliased_encoder()
        replacements: dict[str, str | int | None] = {joint: ""} if joint else {}
        replacements.update(literals or {})
        try:
            return encoder.encode(encoder.rename(text).translate(str.maketrans(replacements)))
        except TypeError as error:
            raise _not_unicode(whole) from error

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of these tokens; ids outside the vocabulary have none. Invalid UTF-8 becomes U+FFFD."""
        return self._pieces.decode(token_ids, self.special_ids if skip_special_tokens else NO_IDS)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for: half a character is half its bytes. Empty where a vocabulary does not spell bytes."""
        piece = self._pieces.piece(token_id)
        return piece.encode() if isinstance(piece, str) else piece

    def text_stream(self, *, skip_special_tokens: bool = True, context_ids: Sequence[int] = ()) -> TextStream:
        """A decoder for one request's tokens, which continue ``context_ids``."""
        return self._pieces.stream(self.special_ids if skip_special_tokens else NO_IDS, context_ids)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if not isinstance(text, str):
            raise InvalidRequestError(f"text must be a string, got {type(text).__name__}")
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            raise _not_unicode(text) from error

    def _aliased_encoder(self) -> AliasedEncoder:
        with self._aliased_lock:
            if self._aliased is None:
                self._aliased = AliasedEncoder(self._backend, self._special_tokens, self.control_tokens.pattern)
            return self._aliased

    def _id_of(self, name: str) -> int | None:
        token = self.named_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)


def _complete(backend: Backend, settings: TokenizerSettings) -> None:
    """Make the backend agree with the side files, as ``AutoTokenizer`` does: what is missing is added.

    One thing more: the begin and end tokens are control tokens even if the vocabulary lists them as ordinary added ones,
    or a user could type the end of a turn.
    """
    backend.no_truncation()  # some published files truncate at 512
    backend.no_padding()
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens([token for token in settings.added_tokens if token.content not in known])
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    ends = {settings.named_tokens.get("bos_token"), settings.named_tokens.get("eos_token")}
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    for token in settings.special_tokens:
        if token.content not in known or (token.content in ends and token.content not in special):
            backend.add_special_tokens([token])


def _load_with_transformers(directory: Path) -> Backend:
    """The slow door: vocabularies in another format (SentencePiece, tiktoken, vocab + merges)."""
    if not any(directory.glob("*token*")) and not any(directory.glob("vocab*")):
        raise ModelLoadError(f"{directory} has no tokenizer: tokenizer.json is missing; add it, or pass token ids as prompts")
    from transformers import AutoTokenizer

    try:
        backend = AutoTokenizer.from_pretrained(str(directory), local_files_only=True).backend_tokenizer
    except Exception as error:  # it raises whatever its format readers raise
        raise ModelLoadError(
            f"{directory} has no tokenizer.json, and transformers cannot read its other tokenizer files ({error}); "
            "add a tokenizer.json"
        ) from error
    if not isinstance(backend, Backend):
        raise ModelLoadError(f"{directory} has only a slow Python tokenizer, which is not supported; add a tokenizer.json")
    return backend


def _not_unicode(text: str) -> InvalidRequestError:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return InvalidRequestError(f"text holds {text[error.start]!r} at position {error.start}, which is no Unicode character")
    return InvalidRequestError(f"text cannot be encoded: {text!r:.200}")
