"""A table of named things that plugins contribute to: who added what, and no name twice.

Filled while plugins are loaded, on one thread; read from any thread afterwards. Knows nothing of plugins but their names.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from minivllm_plugin.errors import ConfigError

__all__ = ["BUILTIN", "Registry", "RegistryGroup"]

T = TypeVar("T")

BUILTIN = "minivllm-plugin"
"""Owner of what this package itself brings."""

UNOWNED = "this program"  # somebody who fills a registry with no plugin around it


@dataclass(frozen=True, slots=True)
class _Entry(Generic[T]):
    owner: str
    value: T


class Registry(Generic[T]):
    """Names in the order in which they were added. Subclasses say what they hold (:attr:`kind`) and how it is added."""

    kind = "entry"

    def __init__(self) -> None:
        self._entries: dict[str, _Entry[T]] = {}
        self._adding = UNOWNED

    @contextmanager
    def owned_by(self, owner: str) -> Iterator[None]:
        """What is added inside the block belongs to ``owner``, the name of a plugin."""
        before, self._adding = self._adding, owner
        try:
            yield
        finally:
            self._adding = before

    def get(self, name: str) -> T | None:
        """What stands under ``name``, or None."""
        entry = self._entries.get(name)
        return None if entry is None else entry.value

    def names(self) -> tuple[str, ...]:
        """All names, the first one added first."""
        return tuple(self._entries)

    def owner(self, name: str) -> str | None:
        """The plugin that added ``name``; None if nobody did."""
        entry = self._entries.get(name)
        return None if entry is None else entry.owner

    def items(self) -> Mapping[str, T]:
        """A copy: name -> what stands under it, in the order of :meth:`names`."""
        return {name: entry.value for name, entry in self._entries.items()}

    def discard_owner(self, owner: str) -> tuple[str, ...]:
        """Take out everything that ``owner`` added, and return its names: for a plugin whose hook failed half-way."""
        gone = tuple(name for name, entry in self._entries.items() if entry.owner == owner)
        for name in gone:
            del self._entries[name]
        return gone

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def describe(self, name: str) -> str:
        """For messages: ``logits processor 'json' of plugin 'grammar'``."""
        return f"{self.kind} {name!r} of plugin {self.owner(name)!r}"

    def _put(self, name: str, value: T) -> None:
        """Add one entry. The same value under the same name again changes nothing.

        Raises:
            ConfigError: the name is no text, or something else stands under it.
        """
        if not isinstance(name, str) or not name.strip():
            raise ConfigError(f"the name of a {self.kind} must be a non-empty string, got {name!r:.100}")
        present = self._entries.get(name)
        if present is None:
            self._entries[name] = _Entry(self._adding, value)
        elif present.value != value:
            raise ConfigError(
                f"{self.kind} {name!r} of plugin {self._adding!r} is already there: plugin {present.owner!r} added it; "
                f"rename it, or leave one of the two plugins out"
            )


class RegistryGroup:
    """Several tables, each with names of its own, that plugins fill through one hook."""

    def __init__(self, *tables: Registry[Any]) -> None:
        self._tables = tables

    @contextmanager
    def owned_by(self, owner: str) -> Iterator[None]:
        """What is added inside the block belongs to ``owner``, the name of a plugin."""
        with ExitStack() as stack:
            for table in self._tables:
                stack.enter_context(table.owned_by(owner))
            yield

    def discard_owner(self, owner: str) -> tuple[str, ...]:
        """Take out everything that ``owner`` added, and return its names."""
        return tuple(name for table in self._tables for name in table.discard_owner(owner))

    def __len__(self) -> int:
        return sum(map(len, self._tables))
