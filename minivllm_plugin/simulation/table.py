"""Results as a person reads them on a terminal."""

from collections.abc import Sequence

from minivllm_plugin.simulation.cost_model import COEFFICIENTS, CostModel
from minivllm_plugin.simulation.figures import ROWS, TENANT_COLUMNS, number, tenant_row
from minivllm_plugin.simulation.result import SimulationResult
from minivllm_plugin.simulation.trace import Trace

__all__ = ["show_cost_model", "show_results"]

WIDTH_OFF_TERMINAL = 160


def show_results(trace: Trace, results: Sequence[SimulationResult]) -> None:
    """A column for each result, tenants below if there are several, and what the simulation itself took."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console = Console(width=None if console.is_terminal else WIDTH_OFF_TERMINAL, highlight=False, markup=False)
    hits, blocks = trace.ideal_hits()
    ideal = f"; its hash ids allow a hit rate of {hits / blocks:.4f} of blocks" if blocks else ""
    skipped = f"; {trace.num_skipped} lines left out" if trace.num_skipped else ""
    console.print(f"{trace.name}: {len(trace):,} requests{ideal}{skipped}")
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for result in results:
        table.add_column(result.name, justify="right")
    for label, value in ROWS:
        table.add_row(label, *(value(result) for result in results))
    console.print(table)
    if any(len(result.tenants) > 1 for result in results):
        tenants = Table(box=None, pad_edge=False, title="tenants", title_justify="left")
        for position, name in enumerate(("simulation", *TENANT_COLUMNS)):
            tenants.add_column(name, justify="left" if position < 2 else "right")
        for result in results:
            for tenant in result.tenants:
                tenants.add_row(result.name, *tenant_row(tenant))
        console.print(tenants)
    for result in results:
        steps, leapt, wall = result.num_steps, result.num_leapt_steps, result.wall_seconds
        rate = f"{number(len(result.requests) / wall)} requests/s, {number(steps / wall)} steps/s" if wall else "at once"
        share = leapt / steps if steps else 0.0
        console.print(
            f"{result.name}: simulated in {wall:.2f} s ({rate}; {share:.0%} of {steps:,} steps leapt over)", style="dim"
        )
    described = results[0].settings.get("cost_model")
    if isinstance(described, dict) and described["description"]:
        console.print(f"cost model: {described['description']}", style="dim")


def show_cost_model(cost: CostModel, num_records: int) -> None:
    """Its coefficients in microseconds."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    console.print(f"cost model, {cost.description}: {num_records} steps, mean error {cost.error:.1%} of a step")
    for name in COEFFICIENTS:
        console.print(f"  {name.replace('_', ' '):<20} {getattr(cost, name) * 1e6:>12,.4g} µs")
