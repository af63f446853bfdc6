"""What one LLM takes from the machine and gives back: memory, threads, no child process, no ``__main__`` guard."""

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from minivllm_plugin import LLM

PROCESS_STATUS = Path("/proc/self/statm")
SMALL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 20_000,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
WEIGHTS_MIB = 2 * 20_000 * 512 * 4 >> 20  # embedding and output layer in float32: 78 MiB
# glibc keeps freed blocks in an arena per thread; without that, what is resident is what we hold.
PLAIN_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "1000000", "MALLOC_ARENA_MAX": "1"}
# A whole program as a user would paste it: no guard, no cleanup of its own.
PROGRAM = """
import gc, os, sys, threading
from minivllm_plugin import LLM, SamplingParams

def resident_mib():
    gc.collect()
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

def tensors_mib():
    import torch
    gc.collect()
    return sum(thing.nbytes for thing in gc.get_objects() if isinstance(thing, torch.Tensor)) >> 20

def children():
    tasks = os.listdir("/proc/self/task")
    return [pid for task in tasks for pid in open(f"/proc/self/task/{task}/children").read().split()]

kept, sizes = [], []
for _ in range(6):
    llm = LLM(sys.argv[1], load_format="dummy", **eval(sys.argv[2]))
    llm.generate([[1, 2, 3]] * 4, SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert children() == [], children()
    assert sum(thread.name.startswith("minivllm") for thread in threading.enumerate()) == 1
    llm.close()
    kept.append(llm)  # closing alone must free it
    assert tensors_mib() < 2, tensors_mib()
    sizes.append(resident_mib())
assert not any(thread.name.startswith("minivllm") for thread in threading.enumerate())
print(sizes)
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    return tmp_path


@pytest.mark.slow
@pytest.mark.skipif(not PROCESS_STATUS.exists(), reason="reads /proc")
@pytest.mark.parametrize("options", [{"dtype": "float16"}, {"dtype": "float32"}, {}], ids=str)
def test_close_gives_the_memory_back_and_nothing_else_was_started(small: Path, options: dict[str, Any]) -> None:
    command = [sys.executable, "-c", PROGRAM, str(small), repr(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, **PLAIN_MALLOC})
    assert done.returncode == 0, done.stderr
    sizes = json.loads(done.stdout.strip().splitlines()[-1])
    assert sizes[-1] - sizes[0] < WEIGHTS_MIB // 2, sizes  # five more models were loaded meanwhile


def test_the_pool_has_a_modest_default_that_is_reported(small: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "minivllm_plugin")
    with LLM(str(small), load_format="dummy") as llm:
        [line] = [record.getMessage() for record in caplog.records if "KV blocks" in record.getMessage()]
        found = re.search(r"(\d+) KV blocks of (\d+) tokens \((\d+) MiB\), context window (\d+) of the model's (\d+)", line)
        assert found is not None, line
        blocks, block_size, mebibytes, window, longest = map(int, found.groups())
        assert (blocks, block_size, window, longest) == (llm.num_blocks, 16, llm.max_model_len, 256)
        assert blocks * block_size == 16_384
        assert mebibytes <= 1024


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_pool_in_bytes_holds_as_many_blocks_as_fit(small: Path, dtype: str) -> None:
    width = {"float32": 4, "float16": 2}[dtype]
    block = 2 * 2 * 16 * 4 * 64 * width  # keys and values, layers, tokens, heads, head size
    with LLM(str(small), load_format="dummy", dtype=dtype, kv_cache_bytes=5 * block + block // 2) as llm:
        assert llm.num_blocks == 5
        assert llm.max_model_len == 80
