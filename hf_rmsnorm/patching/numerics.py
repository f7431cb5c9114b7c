"""In whose order of rounding a norm is computed: the model's own, or that of the server
that generates for it.

`docs/correctness.md` states each order, with the source it was read from.
"""

from dataclasses import replace

from ..formula import NormSpec
from ..fused.recipe import Recipe

# What `as_rounded_by` follows, by name.
SERVERS = {
    "vllm": "vLLM 0.33.0",
    "sglang": "SGLang 0.5.23",
    "torch": "torch.nn.functional",
}
NUMERICS = ("model", *SERVERS)


def as_rounded_by(numerics: str, recipe: Recipe) -> Recipe:
    """A recipe whose formula is computed in this order of rounding.

    Raises:
        ValueError: the server has no such formula.
    """
    own = recipe.own or recipe
    if numerics == "model":
        return own
    served = None
    where = ""
    if own.layout != "last":
        where = f" {own.notes()}"
    elif not own.other_input:
        served = _formula(numerics, own.spec)
    if served is None:
        raise ValueError(f"{SERVERS[numerics]} has no {own.spec}{where}")
    spec, rounds_sum = served
    # what follows may count on the order in memory of torch's own norms
    loses_order = own.spec.functional and not spec.functional
    return replace(
        own,
        spec=spec,
        own=own,
        row_major=own.row_major or loses_order,
        numerics=numerics,
        rounds_sum=rounds_sum,
    )


def _formula(numerics: str, own: NormSpec) -> tuple[NormSpec, bool] | None:
    """(the formula in the server's order of rounding, whether a residual sum in front
    of it is rounded first).
    """
    if own.eps_outside:
        return None
    if own.gate is not None or own.group_size is not None:
        return _gated_formula(own) if numerics == "vllm" else None
    if own.centered or numerics == "torch":
        return _formula_of_torch(own)
    if own.has_bias:
        return None
    spec = replace(own, rounding="once", functional=False)
    has_offset = own.weight_offset != 0.0
    if numerics == "sglang":
        return spec, has_offset
    if own.has_weight and not has_offset:
        spec = replace(spec, rounding="before_weight")
    return spec, False


def _formula_of_torch(own: NormSpec) -> tuple[NormSpec, bool] | None:
    """`F.layer_norm`, or `F.rms_norm`, which has no bias."""
    has_rms_bias = own.has_bias and not own.centered
    if own.weight_offset != 0.0 or has_rms_bias:
        return None
    return replace(own, rounding="once", functional=True), True


def _gated_formula(own: NormSpec) -> tuple[NormSpec, bool] | None:
    """vLLM's `Mixer2RMSNormGated`, with the gate before the norm; else its
    `RMSNormGated` with ``norm_before_gate``.
    """
    if own.centered or own.weight_offset != 0.0 or own.has_bias:
        return None
    rounding = "once"
    if own.gate == "silu_before":
        if own.has_weight:
            rounding = "before_weight"
    elif own.group_size:
        return None
    return replace(own, rounding=rounding, functional=False), True
