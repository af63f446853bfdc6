"""How one token is to be drawn from one row of logits. Frozen; the numbers were checked where the request was made."""

from dataclasses import dataclass

__all__ = ["TokenDraw"]


@dataclass(frozen=True, slots=True)
class TokenDraw:
    """One row's draw.

    Attributes:
        uniform: where in the cumulative distribution, [0, 1).
        temperature: greater than 0.
        top_k: keep the k most likely; 0 keeps all.
        top_p: keep the most likely until they reach this mass, (0, 1].
        min_p: drop what is less likely than this share of the most likely, [0, 1].
    """

    uniform: float
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
