"""The plugin's own settings: a TOML file that an environment variable names.

::

    default_weight = 1.0

    [weights]
    acme = 3.0     # gets three times as much as a tenant with weight 1
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["VARIABLE", "Settings"]

VARIABLE = "MINIVLLM_FAIR_SHARE"


@dataclass(frozen=True)
class Settings:
    """How much each tenant may have.

    Attributes:
        weights: tenant -> weight, greater than 0; those that are not named have ``default_weight``.

    Raises:
        ValueError: a weight is no positive number, or the file holds something else.
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    default_weight: float = 1.0

    def __post_init__(self) -> None:
        for name, weight in {**self.weights, "default_weight": self.default_weight}.items():
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
                raise ValueError(f"the weight of {name!r} must be a number greater than 0, got {weight!r}")

    @classmethod
    def from_environment(cls) -> "Settings":
        """From the file that ``MINIVLLM_FAIR_SHARE`` names; the defaults if it is not set."""
        path = os.environ.get(VARIABLE)
        if not path:
            return cls()
        import tomllib  # most starts need no parser

        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        unknown = sorted(set(content) - {"weights", "default_weight"})
        if unknown or not isinstance(content.get("weights", {}), dict):
            raise ValueError(f"{path}: expected default_weight and a table [weights], got {unknown[0] if unknown else content!r}")
        return cls(**content)

    def weight_of(self, tenant: str) -> float:
        """The weight of ``tenant``."""
        return self.weights.get(tenant, self.default_weight)
