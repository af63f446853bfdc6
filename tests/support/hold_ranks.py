"""A program as users write it, with no ``if __name__`` around it: an engine of two processes, started by a thread, then waits."""

import sys
import threading

from minivllm_plugin import LLM, SamplingParams


def start() -> None:
    llm = LLM(sys.argv[1], tensor_parallel_size=2, dtype="float32", num_blocks=16)
    [output] = llm.generate([[5, 9, 11]], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), use_tqdm=False)
    print(*output.outputs[0].token_ids, flush=True)
    kept.append(llm)


kept: list[LLM] = []
thread = threading.Thread(target=start)
thread.start()
thread.join()
sys.stdin.read()
if len(sys.argv) > 2:
    sys.exit(0)  # without closing anything
kept[0].close()
