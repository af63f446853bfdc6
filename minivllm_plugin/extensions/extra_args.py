"""Extensions that a request asks for by name in ``SamplingParams.extra_args``: what logits processors and stop criteria share.

Checked on the caller's thread before a request is queued, so that a misspelt name or an impossible value is refused there.
"""

import logging
import traceback
from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

from minivllm_plugin.errors import ConfigError, InvalidRequestError
from minivllm_plugin.extensions.registry import Registry
from minivllm_plugin.sampling_parameters import SamplingParams

__all__ = ["FailureLog", "RequestedRegistry", "Validates", "check_extra_args"]

logger = logging.getLogger(__name__)


class Validates(Protocol):
    """The part of a processor or criterion that is asked before a request is queued."""

    def validate(self, value: Any, params: SamplingParams) -> None: ...


V = TypeVar("V", bound=Validates)


class RequestedRegistry(Registry[V]):
    """A registry whose names are names in ``extra_args``."""

    methods: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.sibling: Registry[Any] | None = None
        """The other registry over the same names: a plugin may use one name in both, two plugins may not."""

    def add(self, name: str, extension: V) -> None:
        """Offer ``extension`` under ``name``; a request asks for it with ``SamplingParams(extra_args={name: value})``.

        Raises:
            ConfigError: the name is taken, or ``extension`` lacks a method.
        """
        if self.sibling is not None and self.sibling.owner(name) not in (None, self._adding):
            raise ConfigError(
                f"{self.kind} {name!r} of plugin {self._adding!r} has the name of a {self.sibling.describe(name)}; rename it"
            )
        missing = [method for method in self.methods if not callable(getattr(extension, method, None))]
        if missing or isinstance(extension, type):
            what = f"has no {missing[0]}()" if missing else "is a class: add an instance of it"
            raise ConfigError(f"{self.kind} {name!r} of plugin {self._adding!r} {what}; got {extension!r:.100}")
        self._put(name, extension)


def check_extra_args(params: SamplingParams, *registries: RequestedRegistry[Any]) -> None:
    """Raise unless every name in ``extra_args`` is known and its value is accepted. For the caller's thread.

    Raises:
        InvalidRequestError: an unknown name (the known ones are listed), or a value that the extension refuses.
    """
    asked: Mapping[str, Any] = params.extra_args or {}
    for name, value in asked.items():
        found = [registry for registry in registries if name in registry]
        if not found:
            known = sorted({known for registry in registries for known in registry.names()})
            raise InvalidRequestError(
                f"unknown name {name!r} in extra_args; "
                + (f"known are {', '.join(known)}" if known else "this engine has no plugin that takes any")
            )
        for registry in found:
            _validate(registry, name, value, params)


def _validate(registry: RequestedRegistry[Any], name: str, value: Any, params: SamplingParams) -> None:
    try:
        registry.get(name).validate(value, params)  # type: ignore[union-attr]  # it is there: the caller looked
    except InvalidRequestError:
        raise
    except Exception as error:  # a plugin's own code; whatever it raises means that it does not take this value
        cause = str(error) if isinstance(error, ValueError) and str(error) else f"{type(error).__name__}: {error}"
        raise InvalidRequestError(f"{registry.describe(name)} refuses {value!r:.200}: {cause}") from error


class FailureLog:
    """What processors and criteria failed of: every request in one line, the traceback only with an extension's first failure."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def write(self, name: str, request_id: str | None, failure: str, error: Exception | None) -> None:
        trace = ""
        if error is not None and name not in self._known:
            # As text: a log record that keeps the exception would keep its frames, and with them the request's state.
            trace = "\n" + "".join(traceback.format_exception(error)).rstrip()
        self._known.add(name)
        logger.warning("request %r: %s%s", request_id, failure, trace)
