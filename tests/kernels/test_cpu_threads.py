"""The pool behind the CPU kernels: several engines at once, forks, idling, and a system that gives no memory or threads."""

import multiprocessing
import resource
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from cpu_models import CpuDriver, build_module, driver_for, model_config, need_cpu_kernels, random_tokens
from torch import Tensor

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    need_cpu_kernels()


def driver(seed: int = 0, kind: str = "int8", threads: int = 2) -> CpuDriver:
    return driver_for(build_module(model_config(), seed=seed), kind, threads=threads)


def test_decoders_used_from_many_threads_at_once() -> None:
    """Each thread its own decoder, of different thread counts; all share the pool, none sees another."""
    tokens = random_tokens(60, model_config())
    drivers = [
        driver(seed, kind, threads)
        for seed, (kind, threads) in enumerate([("int8", 2), ("float32", 3), ("bfloat16", 1), ("int8", 5)])
    ]
    expected = [each.run(tokens) for each in drivers]
    start = threading.Barrier(len(drivers))

    def work(each: CpuDriver) -> list[Tensor]:
        start.wait(timeout=60)
        return [each.run(tokens, [20, *[1] * 20, 20]) for _ in range(5)]

    with ThreadPoolExecutor(len(drivers)) as pool:
        for results, wanted in zip(pool.map(work, drivers), expected, strict=True):
            assert all(torch.equal(result, wanted) for result in results)


def test_python_runs_while_a_step_is_computed() -> None:
    """The library call holds no interpreter lock: another thread counts on during one long step."""
    config = model_config(hidden_size=576, num_hidden_layers=4, max_position_embeddings=4096)
    long = driver_for(build_module(config), "float32", num_blocks=300, threads=1)
    tokens = random_tokens(4000, config)
    request = long.request(4000)
    done, turns = threading.Event(), 0

    def step() -> None:
        long.step((request, tokens), rows="last")
        done.set()

    thread = threading.Thread(target=step)
    thread.start()
    while not done.is_set():
        turns += 1
        time.sleep(0.001)
    thread.join()
    assert turns > 3


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # that warning is what is tested
def test_a_forked_child_has_a_pool_of_its_own() -> None:
    """Forked while another thread of the parent is inside a step: the child's new decoder and its old one both work."""
    tokens = random_tokens(40, model_config())
    mine, busy = driver(1), driver(2)
    expected = mine.run(tokens)
    stop = threading.Event()

    def keep_busy() -> None:
        while not stop.is_set():
            busy.run(tokens)

    thread = threading.Thread(target=keep_busy)
    thread.start()
    try:
        for _ in range(5):
            assert run_in_a_forked_child(tokens, expected, mine) == 0
    finally:
        stop.set()
        thread.join()
    assert torch.equal(mine.run(tokens), expected)


def run_in_a_forked_child(tokens: list[int], expected: Tensor, inherited: CpuDriver) -> int | None:
    """The exit code; None if it had to be killed."""

    def child() -> None:
        torch.set_num_threads(1)  # torch's own pool does not survive a fork, and would be waited for
        assert torch.equal(inherited.run(tokens), expected)
        fresh = CpuDriver(inherited.config, inherited.weights, threads=3)
        assert torch.isfinite(fresh.run(tokens)).all()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(timeout=60)
    if process.is_alive():
        process.kill()
        process.join()
        return None
    return process.exitcode


IN_A_PROCESS = """
import resource, sys, time
sys.path.insert(0, {support!r})
import torch
from cpu_models import build_module, driver_for, model_config, random_tokens
torch.set_num_threads(1)
config = model_config()
module = build_module(config)
"""


def in_a_process(code: str) -> str:
    """What a fresh interpreter prints."""
    whole = IN_A_PROCESS.format(support=str(SUPPORT)) + code
    run = subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout.strip()


def test_an_idle_engine_costs_nothing() -> None:
    """CPU seconds of the whole process in a second of idling; spinning workers would take one each."""
    spent = in_a_process("""
driver = driver_for(module, "int8", threads=4)
driver.run(random_tokens(50, config), [10] * 5)
time.sleep(0.1)
before = time.process_time()
time.sleep(1.0)
print(time.process_time() - before)
""")
    assert float(spent) < 0.25


NO_MEMORY = """
driver = driver_for(module, "int8", threads={threads}, num_blocks=2000, block_size=16)
tokens = random_tokens(1000, config)
size = 4096 * int(open("/proc/self/statm").read().split()[0])
{before}
resource.setrlimit(resource.RLIMIT_AS, (size + {spare}, resource.RLIM_INFINITY))
try:
    driver.run({tokens})
except {error} as error:
    print(error)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(torch.equal(driver.run(tokens), driver_for(module, "int8", threads=1).run(tokens)))
"""


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_AS") or not Path("/proc/self/statm").exists(), reason="needs Linux limits")
def test_no_memory_for_a_step_is_an_error_and_not_the_end_of_the_process() -> None:
    code = NO_MEMORY.format(threads=1, before="", spare=1 << 20, tokens="tokens * 1", error="MemoryError")
    assert in_a_process(code).splitlines() == ["no memory for the activations of a step of 1000 tokens", "True"]


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_AS") or not Path("/proc/self/statm").exists(), reason="needs Linux limits")
def test_no_thread_to_be_had_is_an_error_and_the_next_step_tries_again() -> None:
    code = NO_MEMORY.format(threads=60, before="", spare=40 << 20, tokens="tokens[:2]", error="RuntimeError")
    said, works = in_a_process(code).splitlines()
    assert "lower num_threads" in said
    assert works == "True"
