"""What each first-party scheduling policy changes, in the simulator: the tables of docs/policies.md.

    python benchmarks/policies.py --docs docs/policies.md

The real Scheduler and BlockManager under a virtual clock, with the simulator's illustrative step times: good for comparing
policies with each other, not for predicting a machine. Synthetic traces are seeded, figures are means over the seeds, so the
same commit gives the same tables anywhere. The Mooncake conversation trace is used where ``MINIVLLM_TRACES`` names its directory.
"""

import argparse
import json
import os
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from minivllm_plugin.plugins.first_party.lpm import LongestPrefixMatch
from minivllm_plugin.plugins.first_party.sjf import ShortestJobFirst
from minivllm_plugin.simulation import SimulationResult, Trace, generate_trace, read_trace, simulate

SEEDS = (1, 2, 3, 4, 5)
TRACES_VARIABLE = "MINIVLLM_TRACES"
MOONCAKE = "conversation_trace.jsonl"

Figure = Callable[[SimulationResult], float]
Variants = Mapping[str, Callable[[], dict[str, Any]]]


@dataclass(frozen=True)
class Scenario:
    """One table: the rows are variants of an engine, the columns figures of their runs.

    ``make``: seed -> trace. ``variants``: row name -> makes the arguments of ``simulate``, new plugin objects each time.
    """

    title: str
    make: Callable[[int], Trace]
    settings: Mapping[str, Any]
    variants: Variants
    figures: Mapping[str, tuple[Figure, str]]
    seeds: tuple[int, ...] = SEEDS

    def rows(self, seeds: Sequence[int]) -> list[dict[str, Any]]:
        """Row name and the mean of each figure over the seeds."""
        results: dict[str, list[SimulationResult]] = {name: [] for name in self.variants}
        for seed in seeds:
            trace = self.make(seed)
            for name, arguments in self.variants.items():
                results[name].append(simulate(trace, **self.settings, **arguments()))
        return [
            {"engine": name, **{column: fmean(map(figure, runs)) for column, (figure, _) in self.figures.items()}}
            for name, runs in results.items()
        ]

    def table(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """As Markdown."""
        lines = [["engine", *self.figures], ["---", *["---:"] * len(self.figures)]]
        for row in rows:
            lines.append([f"`{row['engine']}`", *(form.format(row[column]) for column, (_, form) in self.figures.items())])
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def named(*policies: Any, **arguments: Any) -> Callable[[], dict[str, Any]]:
    """Arguments of ``simulate`` for these policies."""
    return lambda: {"policies": policies, **arguments}


FCFS: Variants = {"fcfs": named()}
SECONDS, PERCENT, COUNT = "{:.2f}", "{:.1%}", "{:,.0f}"
TTFT: dict[str, tuple[Figure, str]] = {
    "TTFT mean": (lambda run: run.ttft.mean, SECONDS),
    "p50": (lambda run: run.ttft.p50, SECONDS),
    "p99": (lambda run: run.ttft.p99, SECONDS),
}
RATE: dict[str, tuple[Figure, str]] = {"output tokens/s": (lambda run: run.output_throughput, COUNT)}
HITS: dict[str, tuple[Figure, str]] = {"prefix hits": (lambda run: run.token_hit_rate, PERCENT)}


# --- traces ----------------------------------------------------------------------------------------------------------


def a_tenth_is_urgent(seed: int) -> Trace:
    trace = generate_trace(500, rate=10, prompt_tokens="uniform:100:500", output_tokens="uniform:50:150", seed=seed)
    rng = random.Random(seed)
    kinds = [("urgent", 0) if rng.random() < 0.1 else ("usual", 5) for _ in trace]
    marked = (replace(one, tenant=name, priority=priority) for one, (name, priority) in zip(trace, kinds, strict=True))
    return replace(trace, requests=tuple(marked))


def short_and_long(seed: int) -> Trace:
    return generate_trace(500, rate=12, prompt_tokens="lognormal:300:1.0:4000", output_tokens="lognormal:150:1.0:1000", seed=seed)


def twelve_prefixes(seed: int) -> Trace:
    return generate_trace(
        400,
        rate=24,
        shared_prefix_tokens=1024,
        num_prefixes=12,
        prompt_tokens="uniform:50:200",
        output_tokens="uniform:20:60",
        seed=seed,
    )


def ten_to_one(seed: int) -> Trace:
    return generate_trace(
        1000, rate=60, tenants={"A": 10, "B": 1}, prompt_tokens="uniform:100:500", output_tokens="uniform:50:150", seed=seed
    )


def more_than_the_pool_holds(seed: int) -> Trace:
    return generate_trace(400, rate=4, prompt_tokens="lognormal:200:1.2:3000", output_tokens="lognormal:200:0.8:1500", seed=seed)


def hot_prefixes_and_a_scan(seed: int) -> Trace:
    hot = generate_trace(
        100,
        rate=0.5,
        tenants={"hot": 1.0},
        prompt_tokens=64,
        output_tokens=32,
        shared_prefix_tokens=1024,
        num_prefixes=2,
        seed=seed,
    )
    scan = generate_trace(
        1000, rate=5, tenants={"scan": 1.0}, prompt_tokens="uniform:200:1200", output_tokens="uniform:32:128", seed=seed + 100
    )
    apart = (replace(one, id_offset=10**6) for one in scan)
    return Trace(tuple(sorted((*hot, *apart), key=lambda one: one.arrival)), name="scan")


def mooncake(path: Path, num_requests: int) -> Callable[[int], Trace]:
    return lambda _: read_trace(path, max_requests=num_requests)


# --- figures ---------------------------------------------------------------------------------------------------------


def of_tenant(name: str, figure: Callable[[Any], float]) -> Figure:
    return lambda run: next(figure(tenant) for tenant in run.tenants if tenant.tenant == name)


def hits_of_tenant(name: str) -> Figure:
    def share(run: SimulationResult) -> float:
        records = [record for record in run.requests if record.tenant == name]
        return sum(record.num_cached_tokens for record in records) / sum(record.num_prompt_tokens for record in records)

    return share


def computed_twice(run: SimulationResult) -> float:
    """Tokens computed beyond what each request needs once: its uncached prompt, and every token but the last."""
    needed = sum(one.num_prompt_tokens - one.num_cached_tokens + one.num_completion_tokens - 1 for one in run.requests)
    return sum(replica.num_batched_tokens for replica in run.replicas) - needed


def mean_ttft(tenant: Any) -> float:
    return float(tenant.ttft.mean)


def scenarios(traces: Path | None) -> dict[str, Scenario]:
    """Name of the policy -> its scenario; ``mooncake`` if the trace is there."""
    made = {
        "priority": Scenario(
            "500 requests, 10 a second, a tenth urgent; 8 at once",
            a_tenth_is_urgent,
            {"max_num_sequences": 8},
            {**FCFS, "priority": named("priority"), "scheduling_policy=priority": named(policy="priority")},
            {
                "urgent: TTFT mean": (of_tenant("urgent", mean_ttft), SECONDS),
                "urgent: p99": (of_tenant("urgent", lambda tenant: tenant.ttft.p99), SECONDS),
                "others: TTFT mean": (of_tenant("usual", mean_ttft), SECONDS),
                "others: longest": (of_tenant("usual", lambda tenant: tenant.ttft.maximum), SECONDS),
                **RATE,
            },
        ),
        "sjf": Scenario(
            "500 requests, 12 a second, log-normal lengths (prompts about 300, answers about 150); 16 at once",
            short_and_long,
            {"max_num_sequences": 16},
            {
                **FCFS,
                "sjf": named("sjf"),
                "sjf, ageing=0": lambda: {"policies": [ShortestJobFirst(ageing=0)]},
                "sjf, ageing=500": lambda: {"policies": [ShortestJobFirst(ageing=500)]},
            },
            {**TTFT, "longest": (lambda run: run.ttft.maximum, SECONDS), **RATE},
        ),
        "lpm": Scenario(
            "400 requests, 24 a second, each with one of 12 prefixes of 64 blocks; a pool of 400 blocks, 8 at once",
            twelve_prefixes,
            {"num_blocks": 400, "max_num_sequences": 8},
            {
                **FCFS,
                "lpm": named("lpm"),
                "lpm, ageing=0": lambda: {"policies": [LongestPrefixMatch(ageing=0)]},
                "lpm, longest_queue=32": lambda: {"policies": [LongestPrefixMatch(longest_queue=32)]},
            },
            {**HITS, **TTFT, "longest": (lambda run: run.ttft.maximum, SECONDS), **RATE},
        ),
        "fair": Scenario(
            "1,000 requests, 60 a second, tenant A sends ten for each of B's; 8 at once",
            ten_to_one,
            {"max_num_sequences": 8},
            {**FCFS, "fair": named("fair")},
            {
                "served A": (of_tenant("A", lambda tenant: tenant.served_tokens), COUNT),
                "served B": (of_tenant("B", lambda tenant: tenant.served_tokens), COUNT),
                "Jain's index": (lambda run: run.service_fairness, "{:.3f}"),
                "A: TTFT mean": (of_tenant("A", mean_ttft), SECONDS),
                "B: TTFT mean": (of_tenant("B", mean_ttft), SECONDS),
                **RATE,
            },
        ),
        "lcf-victim": Scenario(
            "400 requests, 4 a second, log-normal lengths; a pool of 500 blocks, 32 at once, no prefix cache",
            more_than_the_pool_holds,
            {"num_blocks": 500, "max_num_sequences": 32, "enable_prefix_caching": False},
            {**FCFS, "lcf-victim": named("lcf-victim")},
            {
                "tokens computed twice": (computed_twice, COUNT),
                "preemptions": (lambda run: run.num_preemptions, COUNT),
                **TTFT,
                "latency mean": (lambda run: run.latency.mean, SECONDS),
                "latency p99": (lambda run: run.latency.p99, SECONDS),
            },
        ),
        "slru": Scenario(
            "100 requests with one of two hot prefixes of 64 blocks, one every two seconds, among 1,000 that nobody repeats",
            hot_prefixes_and_a_scan,
            {"max_num_sequences": 16},
            {
                f"{name}, {blocks} blocks": named(*policies, num_blocks=blocks)
                for blocks in (512, 1024, 2048)
                for name, policies in (("lru", ()), ("slru", ("slru",)))
            },
            {
                "hits of the hot": (hits_of_tenant("hot"), PERCENT),
                **HITS,
                "TTFT of the hot": (of_tenant("hot", mean_ttft), "{:.3f}"),
            },
        ),
    }
    if traces is not None and (traces / MOONCAKE).is_file():
        made["mooncake"] = Scenario(
            "the first 3,000 requests, to two or three engines in turn; each has 1,024 blocks of 512 tokens, 4,096 tokens a step",
            mooncake(traces / MOONCAKE, 3000),
            {"num_blocks": 1024, "max_num_sequences": 64, "max_num_batched_tokens": 4096},
            {
                f"{'+'.join(policies) or 'fcfs'}, {replicas} engines": named(*policies, replicas=replicas)
                for replicas in (2, 3)
                for policies in ((), ("sjf",), ("lpm",), ("slru",), ("lpm", "slru"))
            },
            {
                **HITS,
                **TTFT,
                "longest": (lambda run: run.ttft.maximum, SECONDS),
                "preemptions": (lambda run: run.num_preemptions, COUNT),
            },
            seeds=(0,),
        )
    return made


# --- command line ----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="a policy, or mooncake; may be repeated")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="how many of them")
    parser.add_argument("--docs", type=Path, help="write the tables between the marks of this page")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args(arguments)
    directory = os.environ.get(TRACES_VARIABLE)
    report: dict[str, Any] = {"date": datetime.now(UTC).date().isoformat(), "scenarios": {}}
    tables: dict[str, str] = {}
    for name, scenario in scenarios(Path(directory) if directory else None).items():
        if options.only and name not in options.only:
            continue
        rows = scenario.rows(scenario.seeds[: options.seeds])
        report["scenarios"][name] = {"title": scenario.title, "rows": rows}
        note = f"Simulated, {report['date']}: {scenario.title}. Seconds are virtual."
        tables[name] = f"{note}\n\n{scenario.table(rows)}"
        print(f"{name}\n\n{tables[name]}\n", flush=True)
    if options.docs:
        write_tables(options.docs, tables)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def write_tables(page: Path, tables: Mapping[str, str]) -> None:
    """Replace what stands between ``<!-- measured NAME -->`` and ``<!-- end -->``."""
    text = page.read_text(encoding="utf-8")
    for name, table in tables.items():
        marked = re.compile(rf"(<!-- measured {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not marked.search(text):
            raise SystemExit(f"{page} has no place for the table of {name!r}: add '<!-- measured {name} -->' and '<!-- end -->'")
        text = marked.sub(lambda match, table=table: f"{match[1]}{table}\n{match[2]}", text)  # type: ignore[misc]  # bound at once
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
