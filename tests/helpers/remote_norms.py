"""Norms as model code outside of Transformers has them: on the hub, in timm, in the
repositories of published models.
"""

import torch
import torch.nn.functional as F
from torch import nn

SIZE = 64


class ScaledNorm(nn.Module):
    def __init__(self, size=SIZE, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps


class InternLM2RMSNorm(ScaledNorm):
    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.eps)
        return self.weight * hidden_states.to(input_dtype)


class BaichuanRMSNorm(ScaledNorm):
    def forward(self, hidden_states):
        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.eps)
        if self.weight.dtype in [torch.float16, torch.bfloat16]:
            hidden_states = hidden_states.to(self.weight.dtype)
        return self.weight * hidden_states


def _cast_if_autocast_enabled(tensor):
    if torch.is_autocast_enabled():
        if tensor.device.type == "cuda":
            dtype = torch.get_autocast_gpu_dtype()
        elif tensor.device.type == "cpu":
            dtype = torch.get_autocast_cpu_dtype()
        else:
            raise NotImplementedError()
        return tensor.to(dtype=dtype)
    return tensor


class MptLPLayerNorm(nn.LayerNorm):
    def __init__(self):
        super().__init__(SIZE)

    def forward(self, x):
        module_device = x.device
        downcast_x = _cast_if_autocast_enabled(x)
        downcast_weight = _cast_if_autocast_enabled(self.weight)
        downcast_bias = _cast_if_autocast_enabled(self.bias)
        with torch.autocast(enabled=False, device_type=module_device.type):
            return F.layer_norm(
                downcast_x,
                self.normalized_shape,
                downcast_weight,
                downcast_bias,
                self.eps,
            )


class OlmoRMSLayerNorm(ScaledNorm):
    def forward(self, x):
        with torch.autocast(enabled=False, device_type=x.device.type):
            og_dtype = x.dtype
            x = x.to(torch.float32)
            variance = x.pow(2).mean(-1, keepdim=True)
            x = x * torch.rsqrt(variance + self.eps)
            x = x.to(og_dtype)
        return self.weight * x


def fast_layer_norm(x, *arguments):
    if torch.jit.is_scripting():
        return F.layer_norm(x, *arguments)
    dt = torch.get_autocast_dtype(x.device.type)
    with torch.amp.autocast(device_type=x.device.type, enabled=False):
        return F.layer_norm(x.to(dt), arguments[0]).to(dt)


class TimmLayerNorm(nn.LayerNorm):
    def __init__(self):
        super().__init__(SIZE)
        self._fast_norm = False

    def forward(self, x):
        if self._fast_norm:
            x = fast_layer_norm(x, self.normalized_shape)
        else:
            x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x


CAST_THEMSELVES = (MptLPLayerNorm,)
ALL = (
    InternLM2RMSNorm, BaichuanRMSNorm, OlmoRMSLayerNorm, TimmLayerNorm,
    *CAST_THEMSELVES,
)  # fmt: skip
