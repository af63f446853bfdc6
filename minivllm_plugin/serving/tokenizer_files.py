"""What the small JSON files beside a tokenizer say: named tokens, end tokens, BOS flag, chat templates.

Reads ``tokenizer_config.json``, ``special_tokens_map.json``, ``generation_config.json``, ``config.json`` and the chat
template files of a model directory, with the precedence that transformers' ``AutoTokenizer`` uses. Knows nothing about
vocabularies. Every unreadable or malformed file is a :class:`ModelLoadError` that names it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from minivllm_plugin.errors import ModelLoadError

__all__ = ["TokenizerSettings", "read_settings"]

DEFAULT_TEMPLATE = "default"
# The first is what transformers writes; the second is a name seen in the wild.
TEMPLATE_DIRECTORIES = ("additional_chat_templates", "chat_templates")
EXTRA_TOKEN_LISTS = ("additional_special_tokens", "extra_special_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSettings:
    """Side information of one tokenizer.

    Attributes:
        named_tokens: ``bos_token``, ``eos_token``, ``pad_token`` … to their text. Chat templates see these names.
        special_tokens: every token declared special, named or not, in file order.
        added_tokens: ``added_tokens_decoder``: tokens that must exist, special or not, ordered by id.
        add_bos_token: True when the directory asks for one BOS before raw text.
        bos_token_id: of ``generation_config.json`` or ``config.json``; None when neither has one.
        eos_token_ids: union of both files, in order of appearance.
        chat_templates: template name to Jinja text; the usual one is called ``default``.
    """

    named_tokens: Mapping[str, str] = field(default_factory=dict)
    special_tokens: tuple[AddedToken, ...] = ()
    added_tokens: tuple[AddedToken, ...] = ()
    add_bos_token: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    chat_templates: Mapping[str, str] = field(default_factory=dict)


def read_settings(directory: Path) -> TokenizerSettings:
    """Read all side files of ``directory``; files that are not there are simply not there.

    Raises:
        ModelLoadError: a file cannot be read, is not JSON, or holds a value of the wrong type.
    """
    path = directory / "tokenizer_config.json"
    config = _read_json(path)
    tokens = dict(config)
    if "added_tokens_decoder" not in config:
        tokens.update(_read_json(directory / "special_tokens_map.json"))
    named, special = _special_tokens(tokens, path)
    generation_path, model_path = directory / "generation_config.json", directory / "config.json"
    generation, model = _read_json(generation_path), _read_json(model_path)
    if isinstance(text_config := model.get("text_config"), dict):
        model = {**text_config, **model}
    bos_ids = [*_token_ids(generation, "bos_token_id", generation_path), *_token_ids(model, "bos_token_id", model_path)]
    eos_ids = [*_token_ids(generation, "eos_token_id", generation_path), *_token_ids(model, "eos_token_id", model_path)]
    return TokenizerSettings(
        named_tokens=named,
        special_tokens=tuple(special),
        added_tokens=_added_tokens(config.get("added_tokens_decoder"), path),
        add_bos_token=config.get("add_bos_token") is True,
        bos_token_id=bos_ids[0] if bos_ids else None,
        eos_token_ids=tuple(dict.fromkeys(eos_ids)),
        chat_templates=_chat_templates(directory, config.get("chat_template"), path),
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON ({error}); fetch the model's files again") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, got {type(value).__name__}; fetch the model's files again")
    return value


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read as UTF-8 text ({error}); fetch the model's files again") from error


def _special_tokens(config: Mapping[str, Any], path: Path) -> tuple[dict[str, str], list[AddedToken]]:
    """Named tokens (any ``*_token`` key) and every special token, as transformers collects them."""
    named: dict[str, str] = {}
    special: list[AddedToken] = []
    for key, value in config.items():
        if key.endswith("_token") and isinstance(value, (str, dict)):
            token = _added_token(value, path, key)
            named[key] = token.content
            special.append(token)
    for key in EXTRA_TOKEN_LISTS:
        extra = config.get(key) or []
        if isinstance(extra, dict):  # {"image_token": "<image>"}: named tokens of one model
            named |= {name: _added_token(value, path, key).content for name, value in extra.items()}
            extra = list(extra.values())
        if not isinstance(extra, list):
            raise ModelLoadError(f"{path}: {key} must be a list of tokens, got {extra!r}")
        special += [_added_token(value, path, key) for value in extra]
    return named, special


def _added_token(value: Any, path: Path, key: str) -> AddedToken:
    if isinstance(value, str) and value:
        return AddedToken(value, special=True, normalized=False)
    if isinstance(value, dict) and isinstance(content := value.get("content"), str) and content:
        flags = {name: bool(value.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "normalized")}
        return AddedToken(content, special=True, **flags)
    raise ModelLoadError(f"{path}: {key} must be a token's text or an object with its content, got {value!r}")


def _added_tokens(decoder: Any, path: Path) -> tuple[AddedToken, ...]:
    if decoder is None:
        return ()
    if not isinstance(decoder, dict):
        raise ModelLoadError(f"{path}: added_tokens_decoder must be an object, got {type(decoder).__name__}")
    try:
        entries = sorted((int(token_id), entry) for token_id, entry in decoder.items())
    except (ValueError, TypeError) as error:
        raise ModelLoadError(f"{path}: added_tokens_decoder must map token ids to tokens ({error})") from error
    tokens = []
    for token_id, entry in entries:
        token = _added_token(entry, path, f"added_tokens_decoder[{token_id}]")
        token.special = bool(entry.get("special", False)) if isinstance(entry, dict) else True
        tokens.append(token)
    return tuple(tokens)


def _token_ids(config: Mapping[str, Any], key: str, path: Path) -> list[int]:
    """``2``, ``[1, 2]`` or nothing; negative ids mean "none" in some old configurations."""
    value = config.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(item, bool) or not isinstance(item, int) for item in ids):
        raise ModelLoadError(f"{path}: {key} must be a token id or a list of token ids, got {value!r}")
    return [item for item in ids if item >= 0]


def _chat_templates(directory: Path, configured: Any, path: Path) -> dict[str, str]:
    """Template files win over the entry in ``tokenizer_config.json``, all of them together."""
    from_files: dict[str, str] = {}
    if (single := directory / "chat_template.jinja").is_file():
        from_files[DEFAULT_TEMPLATE] = _read_text(single)
    for name in TEMPLATE_DIRECTORIES:
        for file in sorted((directory / name).glob("*.jinja")):
            from_files.setdefault(file.stem, _read_text(file))
    if from_files:
        return from_files
    if configured is None:
        configured = _read_json(directory / "chat_template.json").get("chat_template")
    if configured is None:
        return {}
    if isinstance(configured, str):
        return {DEFAULT_TEMPLATE: configured}
    if isinstance(configured, list) and all(isinstance(entry, dict) for entry in configured):
        configured = {entry.get("name"): entry.get("template") for entry in configured}
    if isinstance(configured, dict) and all(isinstance(text, str) for pair in configured.items() for text in pair):
        return dict(configured)
    raise ModelLoadError(f"{path}: chat_template must be a Jinja text or a list of named templates, got {configured!r:.200}")
