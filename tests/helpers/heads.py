"""Queries and keys as patched attentions compute them: in one launch, or in plain torch where no kernel serves."""

import torch

from hf_rmsnorm.ops.launches import launches_of
from hf_rmsnorm.ops.qk import run_qk
from hf_rmsnorm.reference import reference_qk_norm


def fused_qk_norm(q, k, q_weight, k_weight, spec, cos, sin, way=""):
    """(q', k')."""
    if not torch.compiler.is_compiling():
        launched = run_qk(launches_of(spec), (q, k, q_weight, k_weight, cos, sin), way)
        if launched is not None:
            return launched
    return reference_qk_norm(q, k, q_weight, k_weight, spec, cos, sin, way)
