"""One start in a process of its own: ``python -m minivllm_plugin.bench.startup_probe '{"model": …}'`` -> one JSON line.

Moments are on ``time.time()``'s clock, the only one that two processes are promised to share. Everything heavy is imported
inside, because the imports are what is measured.
"""

import json
import sys
import time

__all__ = ["main"]

MARK = "PROBE "


def main(options: dict[str, object]) -> None:
    """Make an engine of ``options``, compute a first token, and print when each was done."""
    moments = {"started": time.time()}
    from minivllm_plugin import LLM

    moments["imported"] = time.time()
    with LLM(**options) as llm:  # type: ignore[arg-type]  # the engine checks its options itself
        moments["ready"] = time.time()
        from minivllm_plugin.bench.clients import exact_length
        from minivllm_plugin.bench.workload import warm_up_prompt

        moments["request_made"] = time.time()
        llm.generate([list(warm_up_prompt(16))], exact_length(1), use_tqdm=False)
        moments["first_token"] = time.time()
        about = {"kernels": llm.kernels, "weights": llm.dtype}
    print(MARK + json.dumps({"moments": moments, "about": about}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
