"""Checks of constructor arguments that the first-party plugins share. Pure; raises ConfigError."""

import math

from minivllm_plugin.errors import ConfigError

__all__ = ["check_number"]


def check_number(name: str, value: object, *, at_least: float = 0.0, at_most: float = math.inf) -> float:
    """``value`` as a float.

    Raises:
        ConfigError: no finite number between the bounds.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not at_least <= float(value) <= at_most:  # type: ignore[arg-type]  # a number, as just seen
        bounds = f"at least {at_least:g}" if at_most == math.inf else f"between {at_least:g} and {at_most:g}"
        raise ConfigError(f"{name} must be a number, {bounds}, got {value!r}")
    return float(value)  # type: ignore[arg-type]  # as above
