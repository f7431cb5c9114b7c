"""Queries and keys as patched attentions compute them: in one launch, or by each norm
and then the rotation.
"""

from functools import partial

import torch
from computed import compute_norm
from transformers.models.glm4_moe.modeling_glm4_moe import apply_rotary_pos_emb

from hf_rmsnorm.formula import HALVES, Rotation
from hf_rmsnorm.ops import chosen_backend
from hf_rmsnorm.ops.backend import under_transform
from hf_rmsnorm.ops.launches import launches_of
from hf_rmsnorm.ops.qk import Rotary, run_qk
from hf_rmsnorm.reference import reference_qk_norm, rotated


def rotated_both(q, k, cos, sin, way=HALVES):
    return rotated(q, cos, sin, way), rotated(k, cos, sin, way)


ONCE = Rotation(once=True)
ROTARIES = {
    "": Rotary(HALVES, rotated_both),
    "once": Rotary(ONCE, partial(rotated_both, way=ONCE)),
    "joined": Rotary(HALVES, apply_rotary_pos_emb),  # by a concatenation
}


def fused_qk_norm(q, k, q_weight, k_weight, spec, cos, sin, way=""):
    """(q', k')."""
    operands = q, k, q_weight, k_weight
    rotary = ROTARIES[way]
    compiling = torch.compiler.is_compiling()
    if not compiling:
        launched = run_qk(launches_of(spec), (*operands, cos, sin), rotary)
        if launched is not None:
            return launched
    if chosen_backend() == "reference" or (not compiling and under_transform()):
        return reference_qk_norm(*operands, spec, cos, sin, rotary.way)
    q = compute_norm(q, q_weight, None, spec)
    k = compute_norm(k, k_weight, None, spec)
    return rotated_both(q, k, cos, sin, rotary.way)
