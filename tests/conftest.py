"""Settings and fixtures that every test sees. The settings must stand before anything imports litellm, gradio or the hub."""

import os

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no price list from the network
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may need the hub
os.environ.setdefault("TRITON_INTERPRET", "1")  # GPU kernels run on the CPU here; read when triton is first imported
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # forked helpers would warn

import gc
from pathlib import Path

import pytest
from workers import available_cores, num_workers, threads_of_a_worker

if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 0)):  # read by torch, which nothing has imported yet
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_of_a_worker(available_cores(), workers)))


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """For ``-n auto``, which scripts/test asks for. With output shown at once (``-s``) there are none: workers' output is not."""
    return 0 if config.option.capture == "no" else num_workers(config.args, available_cores())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A worker takes a file after the other. Those that take long come first, or the last of them keeps one worker alone."""
    if hasattr(config, "workerinput"):
        slow = {item.path for item in items if item.get_closest_marker("slow") or item.get_closest_marker("model")}
        items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="module", autouse=True)
def _collector_skips_what_stays() -> None:
    """A pass of the garbage collector over torch, LiteLLM and Gradio takes half a second, and many tests ask for passes to see
    that nothing keeps what was dropped. What stands before a module begins is not looked through again: no test drops it."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Or extension modules find at the end of the process that their objects were never dropped, and say so."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The real SmolLM2-135M GGUF, pulled into the user's cache on first use. Without a network: skipped here, failed in CI."""
    from minivllm_plugin.errors import ModelDownloadError
    from minivllm_plugin.models.catalog import resolve
    from minivllm_plugin.models.pull import ensure_local

    try:
        return ensure_local(resolve("smollm2-135m"), progress=False)
    except ModelDownloadError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"the real model is not here and could not be fetched: {error}")


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty model cache for one test; returns its (not yet existing) path."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("MINIVLLM_CACHE", str(cache))
    return cache
