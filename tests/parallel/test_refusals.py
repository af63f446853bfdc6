"""What several processes cannot do is refused by name, most of it before a process is started; a rank's own error is ours."""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import rank_processes
from tiny_checkpoints import tiny_checkpoint
from waiting import wait_until

from minivllm_plugin import LLM
from minivllm_plugin.config import EngineConfig
from minivllm_plugin.errors import ConfigError, ModelLoadError, UnsupportedModelError
from minivllm_plugin.extensions import Extensions
from minivllm_plugin.models.catalog import ModelSource
from minivllm_plugin.models.decoder import CausalLM
from minivllm_plugin.models.foreign import Quantization
from minivllm_plugin.models.loader import describe_model
from minivllm_plugin.parallel import groups, ranks, start
from minivllm_plugin.parallel.groups import ProcessGroup
from minivllm_plugin.parallel.plan import RankPlan
from minivllm_plugin.parallel.ranks import Ranks
from minivllm_plugin.parallel.start import rank_devices, start_ranks


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "Llama")[0]


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be an integer of at least 1, got 0"),
        ({"tensor_parallel_size": 2.0}, r"tensor_parallel_size must be an integer of at least 1, got 2\.0"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2 does not go with this model: num_kv_heads=3 neither"),
        (
            {"tensor_parallel_size": 3, "quantization": "int8"},
            r"quantization='int8' needs the compiled CPU kernels.*tensor_paral",
        ),
        ({"tensor_parallel_size": 3, "kv_cache_dtype": "int8"}, r"kv_cache_dtype='int8' needs the compiled CPU kernels"),
    ],
)
def test_settings_that_do_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("smollm2-135m", load_format="dummy", **options)


def test_one_rank_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert rank_devices("cuda", 4) == ("cuda:0", "cuda:1", "cuda:2", "cuda:3")
    assert rank_devices("cuda:1", 2) == ("cuda:1", "cuda:2")
    assert rank_devices("cpu", 3) == ("cpu",) * 3
    with pytest.raises(
        ConfigError, match=r"tensor_parallel_size=4 from device 'cuda:1' on needs 5 .* shows 4; set it to at most 3"
    ):
        rank_devices("cuda:1", 4)
    with pytest.raises(ConfigError, match="works on cuda and cpu, the device is 'mps'"):
        rank_devices("mps", 2)
    monkeypatch.setattr(start.sys, "platform", "win32")
    with pytest.raises(ConfigError, match="needs a POSIX system"):
        rank_devices("cpu", 2)


def test_a_torch_without_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups.dist, "is_gloo_available", lambda: False)
    with pytest.raises(ConfigError, match=r"needs torch.distributed with gloo, which this torch \(.*\) was built without"):
        groups.refuse_without_backend("gloo")
    assert groups.backend_for(torch.device("cuda:1")) == "nccl"
    assert groups.backend_for(torch.device("cpu")) == "gloo"


class Foreign(CausalLM):
    """Never built."""


class Kernels:
    """A backend with nothing in it."""


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize("what", ["architecture", "kernels", "weights"])
def test_plugins_that_every_rank_would_need(what: str, directory: Path) -> None:
    extensions = Extensions.builtin()
    source = ModelSource(str(directory), "directory", str(directory))
    description = describe_model(source, extensions=extensions)
    if what == "architecture":
        with extensions.models.owned_by("acme"):
            extensions.models.add("AcmeForCausalLM", Foreign)
        description = replace(description, config=replace(description.config, architecture="AcmeForCausalLM"))
        message = "model architecture 'AcmeForCausalLM' of plugin 'acme' cannot be used with tensor_parallel_size=2"
    elif what == "kernels":
        with extensions.attention.owned_by("acme"):
            extensions.attention.add("acme", Kernels(), devices=["cpu"], after="reference")
        message = "kernel backend 'acme' of plugin 'acme' cannot be used with tensor_parallel_size=2"
    else:
        assert description.weights is not None
        description.weights.quantization = Quantization("acme", {})
        message = "the weights, which a plugin's reader makes, cannot be used with tensor_parallel_size=2"
    config = EngineConfig(model=str(directory), tensor_parallel_size=2)
    with pytest.raises(ConfigError, match=message):
        start_ranks(config, source, description, "cpu", (), extensions)


@contextmanager
def one_more_rank(directory: Path, home: Path, **options: Any) -> Iterator[tuple[RankPlan, Ranks]]:
    """Rank 1 of 2, told to load from ``home``, while this process is rank 0."""
    rendezvous = Path(tempfile.mkdtemp(prefix="minivllm-ranks-")) / "store"
    source = ModelSource(str(directory), "directory", str(directory))
    engine = EngineConfig(model=str(directory), tensor_parallel_size=2, dtype="float32", **options)
    model = describe_model(source).config
    plan = RankPlan(0, os.getpid(), ("cpu", "cpu"), "gloo", rendezvous, engine, source, model, home)
    processes = Ranks(plan, 1)
    try:
        yield plan, processes
    finally:
        processes.close()
    assert not rendezvous.parent.exists()
    assert [one.process.returncode is None for one in processes._ranks] == [False]


@pytest.mark.parametrize("problem", ["truncated", "no room"])
def test_a_rank_that_cannot_load_says_why(problem: str, directory: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {}
    error: type[Exception] = ModelLoadError
    message = r"rank 1: .*model\.safetensors is truncated or corrupt"
    home = directory
    if problem == "truncated":
        home = tmp_path
        (home / "model.safetensors").write_bytes((directory / "model.safetensors").read_bytes()[:2000])
    else:
        options, error, message = {"kv_cache_bytes": 10}, ConfigError, "rank 1: kv_cache_bytes=10 holds no block"
    with one_more_rank(directory, home, **options) as (plan, processes):
        processes.answers()
        ProcessGroup("gloo", plan.rendezvous, 0, 2, torch.device("cpu"))
        with pytest.raises(error, match=message), processes.explained():
            processes.answers()


def test_a_rank_that_cannot_start_says_why(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "WORKER", "minivllm_plugin.parallel.no_such_module")
    message = r"(?s)rank 1 of 2 .* ended with exit code 1; .*No module named"
    with one_more_rank(directory, directory) as (_, processes), pytest.raises(ranks.RankFailedError, match=message):
        processes.answers()
    monkeypatch.setattr(ranks.sys, "executable", "")
    config = EngineConfig(model=str(directory), tensor_parallel_size=2)
    source = ModelSource(str(directory), "directory", str(directory))
    with pytest.raises(ConfigError, match=r"no process could be started for rank 1 \('': sys.executable is empty"):
        start_ranks(config, source, describe_model(source), "cpu", (), Extensions.builtin())


def test_the_engine_passes_on_what_a_rank_raises(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the whole of loading: the constructor raises the rank's error, and its process is gone."""
    answers = Ranks.answers
    found: list[Ranks] = []

    def fail(self: Ranks) -> Any:
        found.append(self)
        answers(self)
        raise UnsupportedModelError("rank 1: no such thing")

    monkeypatch.setattr(Ranks, "answers", fail)
    with pytest.raises(UnsupportedModelError, match="rank 1: no such thing"):
        LLM(str(directory), tensor_parallel_size=2)
    assert found[0]._ranks[0].process.returncode is not None


def test_a_refusal_after_the_ranks_have_started_leaves_none(directory: Path) -> None:
    with pytest.raises(ConfigError, match="async_scheduling=True needs a runner"):
        LLM(str(directory), tensor_parallel_size=2, async_scheduling=True)
    wait_until(lambda: rank_processes() == set())
