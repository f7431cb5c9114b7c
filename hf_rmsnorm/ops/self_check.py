"""Runs each kind of kernel once on a device, forward and backward. It is compared with
plain torch, as at its first use in a model.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..formula import HALVES, NormSpec
from ..operands import of_modulation, of_norm, of_sum
from ..reference import rotated
from .launches import forget_launches, launches_of
from .norm import modulated_norm, run_norm
from .qk import Rotary, run_qk, run_rotary
from .settings import use_backend

RMS = NormSpec(False, 1e-6, rounding="before_weight")
LAYER = NormSpec(True, 1e-5, has_bias=True, functional=True)
PLAIN = NormSpec(True, 1e-6, has_weight=False, functional=True)
GATED = NormSpec(False, 1e-6, gate="silu_after")


def check_kernels(device: torch.device) -> dict[str, str]:
    """By kind of kernel, "" where it computes what plain torch does, in bfloat16; else
    by how much it differs, or why it does not run.
    """
    found = {}
    forget_launches()
    with use_backend("triton"), torch.enable_grad():
        for name, call in KINDS.items():
            try:
                results = call(partial(_tensor, device))
                outputs = [t for t in results if t is not None and t.requires_grad]
                torch.autograd.backward([t.float().square().sum() for t in outputs])
                found[name] = ""
            except Exception as error:  # of Triton, a compiler or a driver: any
                found[name] = str(error).partition("\n")[0]
    forget_launches()
    return found


def _tensor(device: torch.device, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    t = torch.randn(shape, generator=generator, dtype=torch.float32)
    return t.to(device, torch.bfloat16).requires_grad_()


def _norm(tensor: Callable) -> tuple:
    x, weight = tensor(5, 256), tensor(256)
    return (run_norm(launches_of(RMS), of_norm(x, weight, None)),)


def _layer_norm(tensor: Callable) -> tuple:
    x, weight, bias = (tensor(*shape) for shape in ((5, 256), (256,), (256,)))
    return (run_norm(launches_of(LAYER), of_norm(x, weight, bias)),)


def _gated(tensor: Callable) -> tuple:
    x, weight, gate = (tensor(*shape) for shape in ((5, 256), (256,), (5, 256)))
    return (run_norm(launches_of(GATED), of_norm(x, weight, None, gate)),)


def _sum(tensor: Callable) -> tuple:
    x, weight = tensor(5, 256), tensor(256)
    return run_norm(launches_of(RMS), of_sum(x.detach().flip(0), x, weight, None))


def _modulation(tensor: Callable) -> tuple:
    x, scale, shift = (tensor(2, 5, 256) for _ in range(3))
    return modulated_norm(PLAIN, of_modulation(x, None, None, scale, shift))


def _heads(tensor: Callable) -> tuple:
    q, k = tensor(1, 4, 5, 64), tensor(1, 2, 5, 64)
    weight = tensor(64)
    tables = [tensor(1, 5, 64).detach() for _ in range(2)]
    return run_qk(launches_of(RMS), (q, k, weight, weight, *tables), _ROTARY)


def _rotary(tensor: Callable) -> tuple:
    q, k = tensor(1, 4, 5, 64), tensor(1, 2, 5, 64)
    tables = [tensor(1, 5, 64).detach() for _ in range(2)]
    return run_rotary((q, k, *tables), _ROTARY)


def _rotate(q, k, cos, sin) -> tuple:
    return rotated(q, cos, sin), rotated(k, cos, sin)


_ROTARY = Rotary(HALVES, _rotate)
# by name; each is called with what makes a tensor of a shape
KINDS: dict[str, Callable] = {
    "RMSNorm": _norm,
    "LayerNorm": _layer_norm,
    "gated norm": _gated,
    "residual add + norm": _sum,
    "norm + scale and shift": _modulation,
    "q/k norms + rotary embedding": _heads,
    "rotary embedding": _rotary,
}
