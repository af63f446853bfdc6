"""Text to ids and back: BOS rules (trial F07), agreement with transformers' AutoTokenizer, side files, damage, threads."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import toy_tokenizers as toys
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from minivllm_plugin.errors import InvalidRequestError, ModelLoadError
from minivllm_plugin.serving.tokenizer import Tokenizer
from minivllm_plugin.serving.tokenizer_files import TokenizerSettings

NAMED = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
TEXTS = ["hello world", "", " leading", "žluť 🌶 שלום", "a <|im_start|>user b", "<think>x</think>", "line\n\nline\t", "<s>hello"]


def auto_tokenizer(directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(directory), local_files_only=True)


# --- BOS: one iff the tokenizer says so (F07) ------------------------------------------------------------------------


@pytest.mark.parametrize("post_processor", [True, False])
@pytest.mark.parametrize("flag", [True, False, None])
def test_raw_text_gets_one_bos_iff_the_tokenizer_says_so(tmp_path: Path, post_processor: bool, flag: bool | None) -> None:
    backend = toys.byte_per_token()
    config = NAMED if flag is None else {**NAMED, "add_bos_token": flag}
    directory = toys.save(toys.with_bos(backend) if post_processor else backend, tmp_path, config)
    tokenizer = Tokenizer.load(directory)
    bos = tokenizer.bos_token_id
    assert bos is not None
    expected = 1 if post_processor or flag is True else 0
    for text in ("hello", ""):
        ids = tokenizer.encode(text)
        assert ids.count(bos) == expected
        assert ids[:expected] == [bos] * expected
        assert tokenizer.encode(text, add_special_tokens=False) == ids[expected:]
        if not (flag and not post_processor):  # transformers 5 ignores the flag when there is a tokenizer.json
            assert ids == auto_tokenizer(directory)(text)["input_ids"]
    assert tokenizer.encode("<s>hello").count(bos) == 1
    assert tokenizer.encode("<s>").count(bos) == 1
    assert tokenizer.encode("<s><s>").count(bos) == 2, "what the user wrote is not taken away"


def test_a_flag_without_any_bos_token_adds_nothing(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(toys.save(toys.byte_per_token(), tmp_path, {"add_bos_token": True}))
    assert tokenizer.bos_token_id is None
    assert len(tokenizer.encode("abc")) == 3


# --- agreement with transformers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["trained_byte_level", "byte_per_token", "sentencepiece", "unigram", "wordpiece"])
def test_ids_and_text_equal_auto_tokenizers(tmp_path: Path, family: str) -> None:
    directory = toys.save(getattr(toys, family)(), tmp_path, {} if family == "wordpiece" else {"bos_token": "<s>"})
    ours, theirs = Tokenizer.load(directory), auto_tokenizer(directory)
    assert ours.vocab_size == len(theirs)
    for text in TEXTS if family != "wordpiece" else ["hello worlds.", "goods bye"]:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, add_special_tokens=False) == ids
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_special_tokens_of_the_side_files_are_added_as_auto_tokenizer_adds_them(tmp_path: Path) -> None:
    config = {
        "bos_token": {
            "__type": "AddedToken",
            "content": "<begin>",
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "single_word": False,
        },
        "pad_token": "</tool_call>",  # exists as an ordinary added token, and stays one
        "eos_token": "<|im_end|>",
        "image_token": "<image>",
        "additional_special_tokens": ["<extra>"],
        "added_tokens_decoder": {"900": {"content": "<mark>", "special": False, "normalized": False}},
    }
    directory = toys.save(toys.trained_byte_level(), tmp_path, config)
    ours, theirs = Tokenizer.load(directory), auto_tokenizer(directory)
    text = "a<begin>b</tool_call><image><extra><mark>c"
    ids = ours.encode(text)
    assert ids == theirs(text)["input_ids"]
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == "ab</tool_call><mark>c"
    assert {"bos_token", "pad_token", "image_token"} <= ours.named_tokens.keys()
    assert ours.decode([ours.bos_token_id or 0], skip_special_tokens=False) == "<begin>"


def test_the_end_token_is_a_control_token_whatever_the_vocabulary_says(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(toys.save(toys.trained_byte_level(), tmp_path, {"eos_token": "</tool_call>"}))
    assert set(tokenizer.eos_token_ids) <= tokenizer.special_ids
    assert tokenizer.decode(tokenizer.encode("a</tool_call>b")) == "ab"


def test_special_tokens_map_is_read_when_the_configuration_lists_no_added_tokens(tmp_path: Path) -> None:
    directory = toys.save(
        toys.byte_per_token(), tmp_path, special_tokens_map={"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    )
    tokenizer = Tokenizer.load(directory)
    assert dict(tokenizer.named_tokens) == {"bos_token": "<s>", "eos_token": "</s>"}


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 260), max_size=30), skip=st.booleans())
def test_byte_level_decoding_equals_the_librarys_even_for_broken_bytes(ids: list[int], skip: bool) -> None:
    assert BYTES.decode(ids, skip_special_tokens=skip) == BYTES_BACKEND.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=20))
def test_sentencepiece_decoding_equals_the_librarys_for_every_text(text: str) -> None:
    ids = SENTENCEPIECE.encode(text)
    assert SENTENCEPIECE.decode(ids) == SENTENCEPIECE_BACKEND.decode(ids)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 26), max_size=12))
def test_metaspace_decoding_equals_the_librarys(ids: list[int]) -> None:
    assert METASPACE.decode(ids) == METASPACE_BACKEND.decode(ids)


BYTES_BACKEND = toys.byte_per_token()
BYTES = Tokenizer(BYTES_BACKEND)
SENTENCEPIECE_BACKEND = toys.sentencepiece()
SENTENCEPIECE = Tokenizer(SENTENCEPIECE_BACKEND)
METASPACE_BACKEND = toys.unigram()
METASPACE = Tokenizer(METASPACE_BACKEND)


def test_truncation_and_padding_baked_into_the_file_are_switched_off() -> None:
    backend = toys.byte_per_token()
    backend.enable_truncation(4)
    backend.enable_padding(length=32)
    assert len(Tokenizer(backend).encode("hello world")) == 11


# --- end tokens ------------------------------------------------------------------------------------------------------


def test_end_tokens_are_the_union_of_all_files(tmp_path: Path) -> None:
    directory = toys.save(toys.byte_per_token(), tmp_path, NAMED, generation_config={"eos_token_id": [7, 259]})
    (directory / "config.json").write_text('{"model_type": "llama", "eos_token_id": 9, "bos_token_id": 256}')
    assert Tokenizer.load(directory).eos_token_ids == (259, 7, 9)


def test_end_and_begin_tokens_of_a_nested_configuration(tmp_path: Path) -> None:
    directory = toys.save(toys.byte_per_token(), tmp_path)
    (directory / "config.json").write_text('{"text_config": {"eos_token_id": [1, 2], "bos_token_id": 3}}')
    tokenizer = Tokenizer.load(directory)
    assert (tokenizer.eos_token_ids, tokenizer.bos_token_id) == ((1, 2), 3)


# --- chat templates --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "configured", ["IN CONFIG", [{"name": "default", "template": "IN CONFIG"}, {"name": "tool_use", "template": "T"}]]
)
def test_template_files_win_over_the_configuration(tmp_path: Path, configured: object) -> None:
    directory = toys.save(toys.byte_per_token(), tmp_path, {"chat_template": configured})
    assert Tokenizer.load(directory).chat_template == "IN CONFIG"
    (directory / "chat_template.jinja").write_text("IN FILE")
    assert Tokenizer.load(directory).chat_template == "IN FILE" == auto_tokenizer(directory).chat_template
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("WITH TOOLS")
    templates = Tokenizer.load(directory).chat_templates
    assert templates == {"default": "IN FILE", "tool_use": "WITH TOOLS"} == auto_tokenizer(directory).chat_template


def test_the_old_chat_template_json(tmp_path: Path) -> None:
    directory = toys.save(toys.byte_per_token(), tmp_path, chat_template={"chat_template": "OLD"})
    assert Tokenizer.load(directory).chat_template == "OLD"


# --- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", ""),
        ("tokenizer_config.json", "[1"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"bos_token": {"text": 1}}'),
        ("tokenizer_config.json", '{"additional_special_tokens": 3}'),
        ("tokenizer_config.json", '{"additional_special_tokens": [3]}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": []}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": "y"}}'),
        ("tokenizer_config.json", '{"chat_template": 5}'),
        ("tokenizer_config.json", '{"chat_template": [{"name": "default"}]}'),
        ("generation_config.json", '{"eos_token_id": "2"}'),
        ("generation_config.json", "\x00"),
        ("config.json", '{"bos_token_id": [true]}'),
        ("special_tokens_map.json", "nonsense"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: str) -> None:
    directory = toys.save(toys.byte_per_token(), tmp_path)
    (directory / name).write_text(content)
    with pytest.raises(ModelLoadError, match=name.replace(".", r"\.")):
        Tokenizer.load(directory)


def test_a_truncated_tokenizer_and_binary_templates_are_named(tmp_path: Path) -> None:
    directory = toys.save(toys.trained_byte_level(), tmp_path)
    (directory / "chat_template.jinja").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ModelLoadError, match=r"chat_template\.jinja"):
        Tokenizer.load(directory)
    (directory / "chat_template.jinja").unlink()
    data = (directory / "tokenizer.json").read_bytes()
    (directory / "tokenizer.json").write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        Tokenizer.load(directory)


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is missing"):
        Tokenizer.load(tmp_path)


def test_vocab_and_merges_go_through_transformers(tmp_path: Path) -> None:
    backend = toys.trained_byte_level()
    backend.model.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|im_end|>"}))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    tokenizer = Tokenizer.load(tmp_path)
    text = "hello world, žluť 🌶"
    assert tokenizer.encode(text) == backend.encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_other_files_that_transformers_cannot_read(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"not a model")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelLoadError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("text", ["lone \ud83c surrogate", None, 5, ["list"], b"bytes"])
def test_what_is_no_text_is_refused(text: Any) -> None:
    with pytest.raises(InvalidRequestError):
        BYTES.encode(text)


def test_unknown_ids_have_no_text() -> None:
    assert BYTES.decode([-1, 10**12, 300, *BYTES.encode("a")]) == "a"


# --- threads, imports ------------------------------------------------------------------------------------------------


def test_many_threads_encode_and_decode_at_once() -> None:
    tokenizer = Tokenizer(toys.with_bos(toys.trained_byte_level()), TokenizerSettings(named_tokens=NAMED))
    texts = [f"hello world {n} žluť 🌶 <|im_end|> " * 20 for n in range(8)]
    expected = [tokenizer.encode(text) for text in texts]

    def work(n: int) -> bool:
        text = texts[n % 8]
        guarded = tokenizer.encode_rendered("<|im_start|>\ue000", {"\ue000": "<|im_end|>"})
        ids = tokenizer.encode(text)
        return ids == expected[n % 8] and tokenizer.decode(ids, skip_special_tokens=False) == "<s>" + text and len(guarded) > 2

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(200)))


def test_the_normal_path_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    directory = toys.save(toys.byte_per_token(), tmp_path, NAMED)
    code = (
        "import sys; from minivllm_plugin.serving.tokenizer import Tokenizer;"
        f"t = Tokenizer.load({str(directory)!r}); assert t.decode(t.encode('hi')) == 'hi';"
        "print([m for m in ('torch', 'transformers', 'jinja2') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert result.stdout.strip() == "[]"


def test_loading_does_not_touch_the_directory(tmp_path: Path) -> None:
    directory = toys.save(toys.byte_per_token(), tmp_path, NAMED)
    before = {path: path.stat().st_mtime_ns for path in directory.iterdir()}
    assert isinstance(Tokenizer.load(str(directory))._backend, Backend)
    assert {path: path.stat().st_mtime_ns for path in directory.iterdir()} == before
