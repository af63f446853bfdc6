"""The columns of one trace file: which name means what, and each value checked. Knows nothing of how lines are read."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from minivllm_plugin.errors import ConfigError
from minivllm_plugin.simulation.trace import TraceRequest

__all__ = ["Columns"]

# Names without case and punctuation.
PROMPT = ("prompttokens", "inputlength", "contexttokens", "requesttokens", "inputtokens", "promptlength", "promptlen", "inputlen")
OUTPUT = (
    *("outputtokens", "outputlength", "generatedtokens", "responsetokens", "completiontokens", "outputlen"),
    *("numoutputtokens", "numcompletiontokens"),
)
SECONDS = ("arrival", "arrivals", "arrivaltime", "arrivalseconds", "arrivaltimes", "time")
MILLISECONDS = ("arrivalms", "timestampms", "arrivaltimems")
AMBIGUOUS = ("timestamp",)
HASH_IDS = ("hashids", "prefixhashids", "prefixids", "blockhashes")
TENANT = ("tenant", "user", "userid", "tenantid")
# Whose "timestamp" counts what: the name of the prompt column tells the traces apart.
TIMESTAMP_UNITS = {"inputlength": 1e-3, "requesttokens": 1.0}


class Columns:
    """Turns rows into requests.

    Args:
        path: for messages.
        time_unit: of numeric arrivals; None knows it from the names.
    """

    def __init__(self, path: Path, time_unit: str | None) -> None:
        self._path = path
        self._unit = None if time_unit is None else {"s": 1.0, "ms": 1e-3}[time_unit]
        self._is_dated = False
        self._names: dict[str, str] = {}

    def request(self, line: int, row: Mapping[str, Any]) -> TraceRequest:
        """The request on this line; lengths are checked for being integers, the rest is :meth:`TraceRequest.check`'s."""
        columns = {self._plain(name): value for name, value in row.items()}
        prompt_name, prompt = self._needed(line, columns, PROMPT, "prompt tokens")
        output_name, output = self._needed(line, columns, OUTPUT, "output tokens")
        return TraceRequest(
            arrival=self._arrival(line, columns, prompt_name),
            prompt_tokens=self._integer(line, prompt_name, prompt),
            output_tokens=self._integer(line, output_name, output),
            hash_ids=tuple(self._list(line, columns, HASH_IDS)),
            segments=self._segments(line, columns),
            output_id=self._optional_integer(line, columns, "outputid"),
            tenant=str(next((columns[name] for name in TENANT if columns.get(name) is not None), "")),
            priority=self._optional_integer(line, columns, "priority") or 0,
        )

    def block_tokens(self, line: int, row: Mapping[str, Any]) -> int | None:
        """What this line says that one hash id stands for."""
        size = self._optional_integer(line, {self._plain(name): value for name, value in row.items()}, "blocktokens")
        if size is not None and size < 1:
            raise ConfigError(f"{self._path}:{line}: block_tokens must be at least 1, got {size}")
        return size

    def from_start(self, requests: Iterable[TraceRequest]) -> list[TraceRequest]:
        """Dates become seconds since the first of them; numbers stay as they are."""
        made = list(requests)
        if not self._is_dated:
            return made
        start = min(request.arrival for request in made)
        return [replace(request, arrival=request.arrival - start) for request in made]

    def _arrival(self, line: int, columns: Mapping[str, Any], prompt_name: str) -> float:
        name, value = self._needed(line, columns, (*SECONDS, *MILLISECONDS, *AMBIGUOUS), "arrival time")
        try:
            number = float(value)
        except (TypeError, ValueError):
            return self._date(line, name, value)
        unit = self._unit
        if unit is None:
            unit = 1.0 if name in SECONDS else 1e-3 if name in MILLISECONDS else TIMESTAMP_UNITS.get(prompt_name)
        if unit is None:
            raise ConfigError(
                f"{self._path}:{line}: is {name}={value!r} in seconds or milliseconds? Set time_unit to 's' or 'ms'"
            )
        arrival = number * unit if unit == 1.0 else number / 1000
        if not math.isfinite(arrival) or arrival < 0:
            raise ConfigError(f"{self._path}:{line}: {name} must be a finite time of at least 0, got {value!r}")
        return arrival

    def _date(self, line: int, name: str, value: object) -> float:
        text = str(value).strip()
        whole, _, fraction = text.partition(".")
        digits = fraction[: len(fraction) - len(fraction.lstrip("0123456789"))]
        try:  # datetime holds six digits of the seven that Azure writes
            base = datetime.fromisoformat(whole + fraction[len(digits) :])
        except ValueError as error:
            raise ConfigError(f"{self._path}:{line}: {name} must be a number or a date and time, got {value!r}") from error
        self._is_dated = True
        return (base - datetime(1970, 1, 1, tzinfo=base.tzinfo)).total_seconds() + (float(f"0.{digits}") if digits else 0.0)

    def _needed(self, line: int, columns: Mapping[str, Any], names: tuple[str, ...], what: str) -> tuple[str, Any]:
        for name in names:
            if columns.get(name) not in (None, ""):
                return name, columns[name]
        raise ConfigError(
            f"{self._path}:{line}: no column holds the {what}; there are {', '.join(columns) or 'none'}, and any of "
            f"{', '.join(names[:4])} would do"
        )

    def _integer(self, line: int, name: str, value: object) -> int:
        try:
            if isinstance(value, bool):
                raise ValueError
            number = int(value) if isinstance(value, int) else float(str(value))
            if number != int(number):
                raise ValueError
        except (ValueError, OverflowError) as error:
            raise ConfigError(f"{self._path}:{line}: {name} must be an integer, got {value!r}") from error
        return int(number)

    def _optional_integer(self, line: int, columns: Mapping[str, Any], name: str) -> int | None:
        value = columns.get(name)
        return None if value in (None, "") else self._integer(line, name, value)

    def _list(self, line: int, columns: Mapping[str, Any], names: tuple[str, ...]) -> list[int]:
        for name in names:
            value = columns.get(name)
            if value in (None, "", []):
                continue
            entries = self._json(line, name, value) if isinstance(value, str) and value.lstrip().startswith("[") else value
            if isinstance(entries, str):
                entries = entries.replace(";", " ").split()
            if not isinstance(entries, list):
                raise ConfigError(f"{self._path}:{line}: {name} must be a list of integers, got {value!r:.80}")
            return [entry if type(entry) is int else self._integer(line, name, entry) for entry in entries]
        return []

    def _segments(self, line: int, columns: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
        value = columns.get("segments")
        if value in (None, "", []):
            return ()
        entries = self._json(line, "segments", value) if isinstance(value, str) else value
        if not isinstance(entries, list) or not all(isinstance(entry, list) and len(entry) == 2 for entry in entries):
            raise ConfigError(f"{self._path}:{line}: segments must be a list of [content id, tokens], got {value!r:.80}")
        return tuple((self._integer(line, "segments", one), self._integer(line, "segments", two)) for one, two in entries)

    def _json(self, line: int, name: str, text: str) -> Any:
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{self._path}:{line}: {name} is not a JSON list: {text!r:.80}") from error

    def _plain(self, name: str) -> str:
        plain = self._names.get(name)
        if plain is None:
            plain = self._names[name] = "".join(filter(str.isalnum, name.lower()))
        return plain
