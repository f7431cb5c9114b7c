"""Which formulas each family of kernels computes, in the words of `NormSpec.axes`.

What is not listed is refused. So a field or a value that is added to `NormSpec` is computed by no kernel, never as
another formula, until somebody writes it into the kernels and then here.
"""

from ..formula import NormSpec

_ROWS = frozenset({
    "centered", "has_bias", "weight_offset", "functional", "eps_outside", "rounding=before_weight",
    "rounding=weight_dtype", "rounding=rstd",
})  # fmt: skip
SERVES = {
    "rows": _ROWS | {"gate=silu_before", "gate=silu_after", "gate=sigmoid_after"},
    "residual sum": _ROWS,
    "queries and keys": _ROWS,
    # xhat has to follow from the output alone, and with its own rounding.
    "from the output": _ROWS - {"eps_outside", "rounding=rstd"},
}


def unserved(spec: NormSpec, *families: str) -> str | None:
    """What of a formula some of these families do not compute, in words, or None."""
    for family in families:
        if not spec.axes <= SERVES[family]:
            return f"its formula has {', '.join(sorted(spec.axes - SERVES[family]))}"
    return None


def require(spec: NormSpec, *families: str) -> None:
    """Raise `NotImplementedError` for a formula that reached a launch which does not compute it."""
    missing = unserved(spec, *families)
    if missing is not None:
        raise NotImplementedError(f"{missing}, which the kernels for {' and '.join(families)} do not compute")
