"""What contestants are asked to do, as ``peers/protocol.py`` reads it: the workloads of ``minivllm bench``, as JSON."""

from typing import Any

from minivllm_plugin.bench.workload import Workload, offline_workload, prefill_prompt, prefix_workload, warm_up_prompt

__all__ = ["JobMaker"]

SHARED_PREFIX = 1000


class JobMaker:
    """Jobs for one model on one machine.

    Args:
        threads: that every contestant gets; a peer without such a setting takes what it likes.
        dummy: the weights are random, so that neither the time to be ready nor memory is compared.
    """

    def __init__(self, *, dummy: bool, threads: int, max_model_len: int, seed: int) -> None:
        self._common = {"dummy": dummy, "threads": threads, "max_model_len": max_model_len}
        self._seed = seed

    def start(self) -> dict[str, Any]:
        """As little as shows that an engine works."""
        return self._job("start", [_case("little", Workload((warm_up_prompt(),), (8,)))])

    def offline(self, sizes: list[int], prefill: int) -> dict[str, Any]:
        """Cases ``n=…`` of so many prompts at once; of the long prompt (0 tokens: none) what goes in is counted."""
        cases = [_case(f"n={size}", offline_workload(size, seed=self._seed)) for size in sizes]
        if prefill:
            cases.append(_case(f"prefill {prefill}", Workload((prefill_prompt(prefill),), (1,)), counts="input"))
        return self._job("offline", cases)

    def prefix(self, requests: int) -> dict[str, Any]:
        """So many requests at once that begin with the same 1,000 tokens: unknown to the engine, then computed beforehand."""
        cold, warm = (prefix_workload(requests, shared=SHARED_PREFIX, seed=self._seed + more) for more in (0, 1))
        remembered = list(warm.prompts[0][:SHARED_PREFIX])
        cases = [_case("prefix cold", cold), {**_case("prefix warm", warm), "remembered": remembered}]
        return self._job("prefix", cases, prefix_caching=True)

    def _job(self, name: str, cases: list[dict[str, Any]], *, prefix_caching: bool = False) -> dict[str, Any]:
        warm_up = {"prompts": [list(warm_up_prompt())], "outputs": [8]}
        return {"name": name, **self._common, "prefix_caching": prefix_caching, "warm_up": warm_up, "cases": cases}


def _case(name: str, work: Workload, *, counts: str = "output") -> dict[str, Any]:
    return {"name": name, "prompts": list(map(list, work.prompts)), "outputs": list(work.output_lengths), "counts": counts}
