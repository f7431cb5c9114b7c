"""Compare fused residual sums and q/k norms with norms that are swapped one by one:
same bits, less work.
"""

from __future__ import annotations

import inspect
import re
import sys

import torch

import hf_rmsnorm
from benchmarks.counting import Operators

from .inputs import fresh, tensors

NEW_TOKENS = 3


def compare_fusion(model, arguments: dict, same_bits) -> dict:
    """Run a model in Triton's interpreter with its norms alone swapped, and with what
    surrounds them fused.

    Args:
        same_bits: whether two lists of tensors are equal, each bit.

    Returns:
        ``operators``: of one forward, views and allocations left out, kernel launches
            counted, as Hugging Face's,
        with norms alone, and fused. ``launches``: of these the last has so many.
            ``hidden_states``: whether the model
        returns them. ``bit_equal``: of all outputs, and ``tokens_equal`` of greedy
            ones, or why there are none. ``rotation``: as of `_rotation`.
    """
    found: dict = {"operators": [], "hidden_states": True}
    outputs, tokens = [], []
    try:
        with torch.no_grad():
            model(**fresh(arguments), output_hidden_states=True)
        arguments = {**arguments, "output_hidden_states": True}
    except TypeError:
        found["hidden_states"] = False
    for options in (None, {"fuse_residual": False}, {"fuse_residual": True}):
        if options is not None:
            hf_rmsnorm.patch_model(model, **options)
        with hf_rmsnorm.use_backend("triton"), torch.no_grad():
            torch.manual_seed(0)
            of_model = model if options is not None else None
            with (
                Operators() as operators,
                hf_rmsnorm.count_launches(of_model) as launches,
            ):
                result = model(**fresh(arguments))
            found["operators"].append(operators.computing + launches.total())
            outputs.append([t.detach().clone() for t in tensors(result)])
            if options is not None and "tokens" not in found:
                try:
                    torch.manual_seed(0)
                    tokens.append(_generate(model, arguments))
                except Exception as error:
                    # whatever it is that this type cannot generate from
                    found["tokens"] = f"{type(error).__name__}: {str(error)[:100]}"
    found["rotation"] = _rotation(model, launches)
    hf_rmsnorm.unpatch_model(model)
    found["launches"] = launches.total()
    found["bit_equal"] = same_bits(outputs[1], outputs[2])
    found["tokens_equal"] = found.pop("tokens", None) or same_bits(
        *([t] for t in tokens)
    )
    return found


def _rotation(model, launches) -> str:
    """Of the rotary embeddings of a model: ``"fused"``, alone or with norms, or why one
    is not; "" where it has none.
    """
    pieces = []
    for piece in launches.pieces:  # some layers may have no positions
        if "rotary" in piece.what and (piece.has_run or piece.missed):
            pieces.append(piece)
    for piece in pieces:
        if piece.missed:
            return piece.reason
    if pieces:
        return "fused"
    for module in model.modules():
        code = inspect.unwrap(type(module).forward).__code__
        for name in code.co_names:
            if re.search("rotary_pos_emb|rotary_emb$|_rope", name) and name in vars(
                sys.modules[type(module).__module__]
            ):
                return f"{name} is called or rotates in another way"
    return ""


def _generate(model, arguments: dict) -> torch.Tensor:
    given = {
        name: value
        for name, value in fresh(arguments).items()
        if name != "output_hidden_states"
    }
    return model.generate(
        **given, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False
    )
