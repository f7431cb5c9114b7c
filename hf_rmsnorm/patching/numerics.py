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
    is_plain = own.layout == "last" and not own.other_input
    served = _formula(numerics, own.spec) if is_plain else None
    if served is None:
        where = "" if own.layout == "last" else f" {own.notes()}"
        raise ValueError(f"{SERVERS[numerics]} has no {own.spec}{where}")
    spec, rounds_sum = served
    return replace(
        own,
        spec=spec,
        own=own,
        # what follows may count on it
        row_major=own.row_major or (own.spec.functional and not spec.functional),
        numerics=numerics,
        rounds_sum=rounds_sum,
    )


def _formula(numerics: str, own: NormSpec) -> tuple[NormSpec, bool] | None:
    """(the formula in the server's order of rounding, whether a residual sum in front
    of it is rounded first).
    """
    if own.eps_outside or own.weight_offset not in (0.0, 1.0):
        return None
    if own.gate is not None or own.group_size is not None:
        gated = _gated_formula(own) if numerics == "vllm" else None
        return None if gated is None else (gated, True)
    plain = replace(own, rounding="once", functional=False)
    if own.centered or numerics == "torch":
        unknown = own.weight_offset or (own.has_bias and not own.centered)
        return None if unknown else (replace(plain, functional=True), True)
    return None if own.has_bias else _server_formula(numerics, plain)


def _server_formula(numerics: str, plain: NormSpec) -> tuple[NormSpec, bool]:
    if numerics == "sglang":
        return plain, plain.weight_offset != 0.0
    if plain.has_weight and not plain.weight_offset:
        plain = replace(plain, rounding="before_weight")
    return plain, False


def _gated_formula(own: NormSpec) -> NormSpec | None:
    """vLLM's `Mixer2RMSNormGated`, with the gate before the norm; else its
    `RMSNormGated` with ``norm_before_gate``.
    """
    before = own.gate == "silu_before"
    if own.centered or own.weight_offset or own.has_bias:
        return None
    if own.group_size and not before:
        return None
    rounding = "before_weight" if before and own.has_weight else "once"
    return replace(own, rounding=rounding, functional=False)
