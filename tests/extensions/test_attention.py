"""Kernel backends of plugins: one engine's own, before or behind ours, explained, never passed over in silence."""

import logging
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import SOME_TOKENS, reference_model

from minivllm_kernels import dispatch, reference
from minivllm_kernels.dispatch import BackendTable, KernelUnavailableError, using
from minivllm_plugin import LLM, SamplingParams
from minivllm_plugin.errors import ConfigError
from minivllm_plugin.extensions.attention import BUILT_IN, AttentionBackendRegistry
from minivllm_plugin.hookspecs import hookimpl

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


class Counting:
    """Attention of the reference, counted; with ``scale`` other than 1 a visibly different one."""

    def __init__(self, scale: float = 1.0, reason: str | None = None) -> None:
        self.calls = 0
        self.factor, self.reason = scale, reason

    def attention(self, q: Any, k_cache: Any, v_cache: Any, metadata: Any, scale: float) -> Any:
        self.calls += 1
        return reference.attention(q, k_cache, v_cache, metadata, scale) * self.factor

    def unavailable(self) -> str | None:
        return self.reason


class Plugin:
    minivllm_name = "acme"

    def __init__(self, backend: Any, **place: Any) -> None:
        self.backend, self.place = backend, {"devices": ["cpu"], **place}

    @hookimpl
    def minivllm_register_attention_backends(self, registry: Any) -> None:
        registry.add("counting", self.backend, **self.place)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv(dispatch.ENVIRONMENT_VARIABLE, raising=False)
    dispatch.choose.cache_clear()
    reference_model("Llama", SHAPE).save_pretrained(tmp_path)
    return str(tmp_path)


def answer(model: str, *plugins: Any) -> tuple[list[int], str]:
    with LLM(model, dtype="float32", plugins=list(plugins)) as llm:
        return llm.generate([SOME_TOKENS], GREEDY, use_tqdm=False)[0].outputs[0].token_ids, llm.kernels


def test_before_the_compiled_kernels_it_computes_attention_for_its_engine_alone(
    model: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain, _ = answer(model)
    backend = Counting()
    with caplog.at_level(logging.INFO):
        tokens, kernels = answer(model, Plugin(backend, before="cpu"))
    assert (tokens, kernels) == (plain, "torch")
    assert backend.calls == 6 * 2  # steps and layers
    said = [record.message for record in caplog.records]
    assert "attention runs on kernel backend 'counting' of plugin 'acme'" in said
    wasteful = [message for message in said if message.startswith("the CPU kernels are not used")]
    assert all(
        "kernel backend 'counting' of plugin 'acme' stands before them and computes 'attention'" in line for line in wasteful
    )
    assert answer(model)[0] == plain
    assert backend.calls == 12


def test_two_engines_at_once_each_use_their_own(model: str) -> None:
    odd = Counting(scale=-3.0)
    plain, _ = answer(model)
    with LLM(model, dtype="float32", plugins=[Plugin(odd, before="cpu")]) as first, LLM(model, dtype="float32") as second:
        different = first.generate([SOME_TOKENS], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        results: list[list[int]] = []

        def ask(llm: LLM) -> None:
            results.append(llm.generate([SOME_TOKENS], GREEDY, use_tqdm=False)[0].outputs[0].token_ids)

        threads = [threading.Thread(target=ask, args=(llm,)) for llm in (first, second) * 3]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert different != plain
    assert sorted(results) == sorted([plain, different] * 3)


def test_behind_the_compiled_kernels_it_is_used_only_where_they_are_not(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Counting()
    if dispatch.why_not("cpu", "cpu") is None:
        _, kernels = answer(model, Plugin(backend, before="reference"))
        assert (kernels, backend.calls) == ("cpu", 0)
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, "counting,reference")
    dispatch.choose.cache_clear()
    _, kernels = answer(model, Plugin(backend, before="reference"))
    assert kernels == "torch"
    assert backend.calls == 12
    monkeypatch.undo()
    dispatch.choose.cache_clear()


def test_one_that_only_chooses_tokens_leaves_whole_steps_to_the_compiled_kernels(model: str) -> None:
    calls: list[int] = []

    def argmax(logits: torch.Tensor) -> torch.Tensor:
        calls.append(len(logits))
        return torch.full((len(logits),), 42)

    plain = answer(model)[1]
    tokens, kernels = answer(model, Plugin(types.SimpleNamespace(argmax=argmax), before="cpu"))
    assert (tokens, kernels) == ([42] * 6, plain)
    assert calls == [1, 1, 4]  # the last four are guessed by prompt lookup, and come true together


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        (Counting(reason="the driver is too old"), "the driver is too old"),
        ("no_such_package.kernels", "does not import.*no_such_package"),
        (types.SimpleNamespace(attention=print, unavailable=lambda: 1 / 0), r"its unavailable\(\) failed \(ZeroDivisionError"),
    ],
    ids=["says no", "does not import", "fails to say"],
)
def test_one_that_cannot_run_is_passed_over_aloud(
    model: str, backend: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain, kernels = answer(model)
    with caplog.at_level(logging.WARNING):
        assert answer(model, Plugin(backend, before="cpu")) == (plain, kernels)
    [record] = [record for record in caplog.records if "counting" in record.message]
    with pytest.raises(AssertionError, match=f"kernel backend 'counting' of plugin 'acme' is not used on cpu: .*{reason}"):
        raise AssertionError(record.message)


def test_one_that_is_forced_and_cannot_run_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = AttentionBackendRegistry()
    registry.add("counting", Counting(reason="too old"), devices=["cpu"], before="cpu")
    table = registry.table()
    assert table is not None
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, "counting")
    with pytest.raises(KernelUnavailableError, match=r"'attention' on 'cpu' \(counting: too old\)"):
        table.choose("attention", "cpu")


def test_the_order_is_built_from_before_and_after_and_explained() -> None:
    registry = AttentionBackendRegistry()
    assert registry.table() is None
    with registry.owned_by("acme"):
        registry.add("first", Counting(), devices=["cpu", "cuda"], before="cpu")
        registry.add("second", Counting(), devices=["cuda"], after="first")
        registry.add("last", Counting(), devices=["cpu"], after="reference")
        registry.add("third", "some.module", devices=["mps"], before="reference")
    table = registry.table()
    assert table is not None
    ours = list(dispatch.BACKENDS)
    reference_at = ours.index("reference")
    assert list(table.backends) == [
        *("first", "second", *ours[:reference_at]),
        *("third", "reference", "last", *ours[reference_at + 1 :]),
    ]
    by_op = {choice.op: choice for choice in table.explain("cuda")}
    assert (by_op["attention"].backend, by_op["linear"].backend) == ("first", "reference")
    assert ("first", "does not have this op") in by_op["linear"].passed_over
    assert registry.instead_of_whole_steps(None, "cpu") is None
    registry.discard_owner("acme")
    assert registry.table() is None


def test_a_backend_whose_neighbour_is_gone_is_left_out_aloud(caplog: pytest.LogCaptureFixture) -> None:
    registry = AttentionBackendRegistry()
    with registry.owned_by("gone"):
        registry.add("first", Counting(), devices=["cpu"], before="cpu")
    registry.add("second", Counting(), devices=["cpu"], after="first")
    registry.discard_owner("gone")
    table = registry.table()
    assert table is not None
    assert list(table.backends) == list(dispatch.BACKENDS)
    assert "'second' of plugin 'this program' is not used: it stands next to 'first', which is gone" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"devices": ["cpu"]}, "either before= or after="),
        ({"devices": ["cpu"], "before": "cpu", "after": "cpu"}, "either before= or after="),
        ({"devices": [], "before": "cpu"}, "devices must be a list out of"),
        ({"devices": "cpu", "before": "cpu"}, "devices must be a list out of"),
        ({"devices": ["tpu"], "before": "cpu"}, "devices must be a list out of"),
        ({"devices": ["cpu"], "before": "cutlass"}, "no backend is called 'cutlass'; known are cpu, .*reference"),
        ({"devices": ["cpu"], "before": "cpu", "backend": None}, "must be a module, an object"),
        ({"devices": ["cpu"], "before": "cpu", "backend": "a b"}, "must be a module, an object"),
        ({"devices": ["cpu"], "before": "cpu", "name": "reference"}, "name of a built-in backend"),
    ],
)
def test_what_is_no_backend_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AttentionBackendRegistry().add(arguments.pop("name", "mine"), arguments.pop("backend", Counting()), **arguments)


def test_the_names_of_the_built_in_backends_are_those_of_dispatch() -> None:
    assert tuple(dispatch.BACKENDS) == BUILT_IN


def test_a_table_holds_inside_its_block_on_its_thread_only() -> None:
    mine = types.SimpleNamespace(argmax=lambda logits: "mine")
    table = BackendTable({"mine": (mine, ("cpu",)), **dispatch.builtin_backends()})
    seen: list[Any] = []

    def elsewhere() -> None:
        seen.append(dispatch.implementation("argmax", "cpu"))

    with using(table):
        assert dispatch.implementation("argmax", "cpu") is mine.argmax
        with using(None):
            assert dispatch.implementation("argmax", "cpu") is not mine.argmax
        assert dispatch.implementation("argmax", "cpu") is mine.argmax
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join(60)
    assert dispatch.implementation("argmax", "cpu") is not mine.argmax
    assert seen == [dispatch.implementation("argmax", "cpu")]
    with pytest.raises(RuntimeError), using(table):
        raise RuntimeError
    assert dispatch.implementation("argmax", "cpu") is not mine.argmax
