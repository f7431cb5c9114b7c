"""Which formulas each family of kernels computes, in the words of `NormSpec.axes`.

Launches are made for no other formula. So a new field or value of `NormSpec` is never
computed as another formula: add it to the kernels first, and then here.
"""

from ..formula import NormSpec

_ROWS = frozenset({
    "centered", "has_bias", "weight_offset", "functional", "eps_outside",
    "rounding=before_weight", "rounding=weight_dtype", "rounding=rstd",
})  # fmt: skip
# of `device.activation`
_GATES = frozenset({"gate=silu_before", "gate=silu_after", "gate=sigmoid_after"})
SERVES = {
    "rows": _ROWS | _GATES,
    "residual sum": _ROWS,
    "queries and keys": frozenset({"weight_offset", "rounding=before_weight"}),
    # xhat has to follow from the output alone, and with its own rounding.
    "from the output": _ROWS - {"eps_outside", "rounding=rstd"},
}


def unserved(spec: NormSpec, *families: str) -> str | None:
    """What of a formula some of these families do not compute, in words, or None."""
    for family in families:
        if not spec.axes <= SERVES[family]:
            return f"its formula has {', '.join(sorted(spec.axes - SERVES[family]))}"
    return None
