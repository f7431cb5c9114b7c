"""What the norms of vLLM 0.33.0, SGLang 0.5.23 and torch compute, stated in plain torch
from their own native code.

vLLM: `vllm/ir/ops/layernorm.py` (RMSNorm, GemmaRMSNorm),
`vllm/model_executor/layers/layernorm.py` (LayerNorm, RMSNormGated.forward_static),
`vllm/model_executor/layers/mamba/mamba_mixer2.py` (Mixer2RMSNormGated). SGLang:
`sglang/srt/layers/layernorm.py`, each class's `forward_native`.
"""

import torch
import torch.nn.functional as F


def _hat(h, eps):
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)


def vllm_rms(x, weight, eps, residual=None):
    """(output, rounded sum)."""
    h = x.float() if residual is None else x.float() + residual.float()
    y = _hat(h, eps)
    y = y if weight is None else y.to(weight.dtype) * weight
    return y.to(x.dtype), h.to(x.dtype)


def vllm_gemma(x, weight, eps, residual=None):
    return vllm_rms(x, weight.float() + 1.0, eps, residual)


def sglang_rms(x, weight, eps, residual=None):
    h = x.float() if residual is None else x.float() + residual.float()
    return (_hat(h, eps) * (1.0 if weight is None else weight)).to(x.dtype), h.to(
        x.dtype
    )


def sglang_gemma(x, weight, eps, residual=None):
    x = x if residual is None else x + residual
    return (_hat(x.float(), eps) * (1.0 + weight.float())).to(x.dtype), x


def torch_rms(x, weight, eps, residual=None):
    x = x if residual is None else x + residual
    return F.rms_norm(x, x.shape[-1:], weight, eps), x


def vllm_gated_after(x, gate, weight, eps, sigmoid):
    """`RMSNormGated` with ``norm_before_gate``."""
    z = gate.float()
    return (
        _hat(x.float(), eps)
        * weight.float()
        * (torch.sigmoid(z) if sigmoid else F.silu(z))
    ).to(x.dtype)


def vllm_gated_before(x, gate, weight, eps, group_size):
    """`Mixer2RMSNormGated`."""
    h = x * F.silu(gate.to(torch.float32))
    h = _hat(h.unflatten(-1, (-1, group_size)), eps).flatten(-2)
    return weight * h.to(x.dtype)


RMS = {
    "vllm": (vllm_rms, vllm_gemma),
    "sglang": (sglang_rms, sglang_gemma),
    "torch": (torch_rms, None),
}
