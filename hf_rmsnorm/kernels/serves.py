"""Which formulas each family of kernels computes, in the words of `NormSpec.axes`.

What is not listed is refused. So a field or a value that is added to `NormSpec` is computed by no kernel, never as
another formula, until somebody writes it into the kernels and then here.
"""

from ..formula import NormSpec
from .sizes import TILE_MAX, backward_loops

_ANY_WIDTH = frozenset({
    "centered", "has_bias", "weight_offset", "functional", "eps_outside", "round_offset", "rounding=before_weight",
    "rounding=weight_dtype", "rounding=rstd", "rounding=every_step",
})  # fmt: skip
_TILE = _ANY_WIDTH | {"weight_first", "gate=silu_before", "gate=silu_after", "gate=sigmoid_after"}
SERVES = {
    "forward": _TILE,
    "forward loop": _ANY_WIDTH,
    "backward": _TILE,
    "wide backward": _ANY_WIDTH,
    "residual sum": _ANY_WIDTH | {"weight_first"},
    "queries and keys": _ANY_WIDTH,
    # xhat has to follow from the output alone, and with its own rounding.
    "from the output": _ANY_WIDTH - {"eps_outside", "rounding=rstd", "rounding=every_step"},
}


def unserved(spec: NormSpec, *families: str) -> str | None:
    """What of a formula some of these families do not compute, in words, or None."""
    for family in families:
        if not spec.axes <= SERVES[family]:
            return f"its formula has {', '.join(sorted(spec.axes - SERVES[family]))}"
    return None


def of_rows(spec: NormSpec, hidden_size: int, of_heads: bool = False) -> tuple[str, str]:
    """The families that compute rows of this size, forward and backward; `of_heads`: with a weight for each head."""
    forward = "forward loop" if hidden_size > TILE_MAX else "forward"
    loops = backward_loops(hidden_size, spec.centered, spec.gate is not None or of_heads)
    return forward, "wide backward" if loops else "backward"


def require(spec: NormSpec, *families: str) -> None:
    """Raise `NotImplementedError` for a formula that reached a launch which does not compute it."""
    missing = unserved(spec, *families)
    if missing is not None:
        raise NotImplementedError(f"{missing}, which the kernels for {' and '.join(families)} do not compute")
