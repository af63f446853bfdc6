"""Traces in files: reads the public shapes, writes one of our own. Errors name file, line and value.

Read are JSONL (an object a line) and CSV (a header). Columns are known by name, in any case and with any punctuation:

- Mooncake: ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids``;
- Azure LLM inference: ``TIMESTAMP`` (date and time), ``ContextTokens``, ``GeneratedTokens``;
- BurstGPT: ``Timestamp`` (s), ``Request tokens``, ``Response tokens``;
- ours: ``arrival`` (s), ``prompt_tokens``, ``output_tokens``, and those of :func:`write_trace`.
"""

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from minivllm_plugin.errors import ConfigError
from minivllm_plugin.simulation.columns import Columns
from minivllm_plugin.simulation.trace import DEFAULT_BLOCK_TOKENS, Trace, TraceRequest

__all__ = ["read_trace", "write_trace"]

TimeUnit = Literal["s", "ms"]


def read_trace(
    path: str | Path,
    *,
    time_unit: TimeUnit | None = None,
    block_tokens: int | None = None,
    skip_invalid: bool = False,
    max_requests: int | None = None,
) -> Trace:
    """Read a trace from a ``.csv`` or ``.jsonl`` file.

    Args:
        time_unit: of numeric arrival times; None knows it from the shape.
        block_tokens: what one hash id stands for; None takes the file's word, else 512.
        skip_invalid: leave out lines that cannot be used (an answer of no tokens, say) and count them; else they are errors.
        max_requests: stop reading after so many.

    Raises:
        ConfigError: no such file, another suffix, a missing column, or a value that makes no sense; with file and line.
    """
    path = Path(path)
    if time_unit not in (None, "s", "ms"):
        raise ConfigError(f"time_unit must be 's', 'ms' or None, got {time_unit!r}")
    if max_requests is not None and max_requests < 1:
        raise ConfigError(f"max_requests must be at least 1, got {max_requests!r}")
    columns = Columns(path, time_unit)
    requests: list[TraceRequest] = []
    skipped = 0
    size = block_tokens
    try:
        for line, row in _rows(path):
            try:
                size = size or columns.block_tokens(line, row)
                request = columns.request(line, row)
                _check(path, line, request, size or DEFAULT_BLOCK_TOKENS)
            except ConfigError:
                if not skip_invalid:
                    raise
                skipped += 1
                continue
            requests.append(request)
            if len(requests) == max_requests:
                break
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file in UTF-8 ({error})") from error
    if not requests:
        raise ConfigError(f"{path}: holds no usable request ({skipped} lines were left out)")
    return Trace(tuple(columns.from_start(requests)), size or DEFAULT_BLOCK_TOKENS, path.stem, skipped)


def write_trace(trace: Trace, path: str | Path) -> None:
    """Write a trace so that :func:`read_trace` gives an equal one; the suffix chooses ``.jsonl`` or ``.csv``.

    Raises:
        ConfigError: another suffix, or the directory does not exist.
    """
    path = Path(path)
    if path.suffix not in (".csv", ".jsonl") or not path.absolute().parent.is_dir():
        raise ConfigError(f"{path}: a trace is written to a .csv or .jsonl file in an existing directory")
    rows = [_fields(request, trace.block_tokens) for request in trace]
    with path.open("w", encoding="utf-8", newline="") as file:
        if path.suffix == ".jsonl":
            file.writelines(json.dumps(row) + "\n" for row in rows)
            return
        names = list(dict.fromkeys(name for row in rows for name in row))
        writer = csv.DictWriter(file, names, restval="")
        writer.writeheader()
        for row in rows:
            writer.writerow({name: json.dumps(value) if isinstance(value, list) else value for name, value in row.items()})


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Line number and columns of each line."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; give a .csv or .jsonl trace")
    if path.suffix == ".csv":
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            for row in reader:
                if None in row or None in row.values():
                    raise ConfigError(f"{path}:{reader.line_num}: has not as many values as the header has columns")
                yield reader.line_num, row
    elif path.suffix in (".jsonl", ".ndjson", ".json"):
        with path.open(encoding="utf-8") as file:
            for line, text in enumerate(file, start=1):
                if not text.strip():
                    continue
                try:
                    row = json.loads(text)
                except json.JSONDecodeError as error:
                    raise ConfigError(f"{path}:{line}: not JSON ({error}): {text.strip():.80}") from error
                if not isinstance(row, dict):
                    raise ConfigError(f"{path}:{line}: must be a JSON object, got {text.strip():.80}")
                yield line, row
    else:
        raise ConfigError(f"{path}: the suffix must be .csv or .jsonl, got {path.suffix!r}")


def _check(path: Path, line: int, request: TraceRequest, block_tokens: int) -> None:
    try:
        request.check(block_tokens)
    except ConfigError as error:
        raise ConfigError(f"{path}:{line}: {error}") from error


def _fields(request: TraceRequest, block_tokens: int) -> dict[str, Any]:
    offset = request.id_offset
    row: dict[str, Any] = {
        "arrival": request.arrival,
        "prompt_tokens": request.prompt_tokens,
        "output_tokens": request.output_tokens,
    }
    if request.hash_ids:
        row["hash_ids"] = [content + offset for content in request.hash_ids]
    if request.segments:
        row["segments"] = [[content + offset, tokens] for content, tokens in request.segments]
    if request.output_id is not None:
        row["output_id"] = request.output_id + offset
    if request.tenant:
        row["tenant"] = request.tenant
    if request.priority:
        row["priority"] = request.priority
    row["block_tokens"] = block_tokens
    return row
