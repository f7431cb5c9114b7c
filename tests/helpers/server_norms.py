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
    mean = h.pow(2).mean(-1, keepdim=True)
    return h * torch.rsqrt(mean + eps)


def _float_sum(x, residual):
    h = x.float()
    if residual is None:
        return h
    return h + residual.float()


def _rounded_sum(x, residual):
    if residual is None:
        return x
    return x + residual


def vllm_rms(x, weight, eps, residual=None):
    """(output, rounded sum)."""
    h = _float_sum(x, residual)
    y = _hat(h, eps)
    if weight is not None:
        y = y.to(weight.dtype) * weight
    return y.to(x.dtype), h.to(x.dtype)


def vllm_gemma(x, weight, eps, residual=None):
    return vllm_rms(x, weight.float() + 1.0, eps, residual)


def sglang_rms(x, weight, eps, residual=None):
    h = _float_sum(x, residual)
    y = _hat(h, eps)
    if weight is not None:
        y = y * weight
    return y.to(x.dtype), h.to(x.dtype)


def sglang_gemma(x, weight, eps, residual=None):
    x = _rounded_sum(x, residual)
    y = _hat(x.float(), eps) * (1.0 + weight.float())
    return y.to(x.dtype), x


def torch_rms(x, weight, eps, residual=None):
    x = _rounded_sum(x, residual)
    return F.rms_norm(x, x.shape[-1:], weight, eps), x


def vllm_gated_after(x, gate, weight, eps, sigmoid):
    """`RMSNormGated` with ``norm_before_gate``."""
    activation = F.silu
    if sigmoid:
        activation = torch.sigmoid
    y = _hat(x.float(), eps) * weight.float()
    return (y * activation(gate.float())).to(x.dtype)


def vllm_gated_before(x, gate, weight, eps, group_size):
    """`Mixer2RMSNormGated`."""
    h = x * F.silu(gate.to(torch.float32))
    groups = h.unflatten(-1, (-1, group_size))
    h = _hat(groups, eps).flatten(-2)
    return weight * h.to(x.dtype)


RMS = {
    "vllm": (vllm_rms, vllm_gemma),
    "sglang": (sglang_rms, sglang_gemma),
    "torch": (torch_rms, None),
}
