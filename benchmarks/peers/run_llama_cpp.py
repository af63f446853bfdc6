"""llama.cpp on a job of ``benchmarks/peers.py``: its C API, every sequence in one batch, as llama-server's slots do it.

Runs in its own environment. A remembered prefix is computed once and copied to every sequence inside the cache, the best that
this API offers; without one, sequences share nothing.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import llama_cpp as lib
import numpy as np
from protocol import contest

BATCH = 512


class LlamaCpp:
    def __init__(self, options: argparse.Namespace, job: dict[str, Any]) -> None:
        lib.llama_backend_init()
        self._model = lib.llama_model_load_from_file(options.model.encode(), lib.llama_model_default_params())
        self._vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        cases = job["cases"]
        params = lib.llama_context_default_params()
        longest = max(sum(map(len, case["prompts"])) + sum(case["outputs"]) + len(case.get("remembered") or ()) for case in cases)
        params.n_ctx = -(-longest // 256) * 256 + 256
        params.n_batch = params.n_ubatch = BATCH
        self._spare = max(len(case["prompts"]) for case in cases)  # the sequence that holds a remembered prefix
        params.n_seq_max, params.kv_unified = self._spare + 1, True
        params.n_threads = params.n_threads_batch = job["threads"]
        self._context = lib.llama_init_from_model(self._model, params)
        self._memory = lib.llama_get_memory(self._context)
        self._batch = lib.llama_batch_init(BATCH, 0, 1)
        self._remembered: Sequence[int] = ()

    def generate(self, prompts: Sequence[Sequence[int]], outputs: Sequence[int], name: str) -> int:
        known = len(self._remembered)
        if known:
            for sequence in range(len(prompts)):
                lib.llama_memory_seq_cp(self._memory, self._spare, sequence, 0, known)
        else:
            lib.llama_memory_clear(self._memory, True)
        items = [
            (sequence, position, prompt[position], position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position in range(known, len(prompt))
        ]
        latest: dict[int, int] = {}
        for start in range(0, len(items), BATCH):
            latest.update(self._decode(items[start : start + BATCH]))
        made = len(latest)
        left = {sequence: length - 1 for sequence, length in enumerate(outputs)}
        positions = {sequence: len(prompt) for sequence, prompt in enumerate(prompts)}
        while live := [sequence for sequence, count in left.items() if count > 0]:
            latest.update(self._decode([(sequence, positions[sequence], latest[sequence], True) for sequence in live]))
            for sequence in live:
                positions[sequence] += 1
                left[sequence] -= 1
            made += len(live)
        self._remembered = ()
        return made

    def remember(self, prefix: Sequence[int], name: str) -> None:
        lib.llama_memory_clear(self._memory, True)
        items = [(self._spare, position, token, False) for position, token in enumerate(prefix)]
        for start in range(0, len(items), BATCH):
            self._decode(items[start : start + BATCH])
        self._remembered = prefix

    def _decode(self, items: Sequence[tuple[int, int, int, bool]]) -> dict[int, int]:
        """(sequence, position, token, whether its logits are wanted) of each row -> the likeliest next token of each."""
        self._batch.n_tokens = len(items)
        for row, (sequence, position, token, wanted) in enumerate(items):
            self._batch.token[row], self._batch.pos[row], self._batch.n_seq_id[row] = token, position, 1
            self._batch.seq_id[row][0] = sequence
            self._batch.logits[row] = wanted
        if lib.llama_decode(self._context, self._batch) != 0:
            raise SystemExit("llama_decode failed")
        return {
            sequence: int(np.ctypeslib.as_array(lib.llama_get_logits_ith(self._context, row), shape=(self._vocab_size,)).argmax())
            for row, (sequence, _, _, wanted) in enumerate(items)
            if wanted
        }


if __name__ == "__main__":
    contest(LlamaCpp, ("llama-cpp-python",))
