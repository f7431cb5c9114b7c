"""What the tests of real hardware share: the device, the marks, and how a norm is run
and fused.

`pytest -m gpu` runs those tests on the current GPU. ``HF_RMSNORM_REHEARSE_GPU_TESTS=1
TRITON_INTERPRET=1 pytest -m gpu tests/gpu`` runs the bodies of those that can on the
CPU with fewer sizes, so that a mistake in a test is found where there is no GPU;
`python -m benchmarks gpu --dry-run` does that.
"""

import copy
import os

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from hf_rmsnorm import count_launches, patch_model

GPU = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
REHEARSAL = not GPU and os.environ.get("HF_RMSNORM_REHEARSE_GPU_TESTS") == "1"
DEVICE = "cuda" if GPU else "cpu"

gpu_tests = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (GPU or REHEARSAL), reason="needs a GPU that Triton serves"),
]
real_gpu = pytest.mark.skipif(not GPU, reason="cannot be rehearsed without a GPU")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MODULES = {
    "llama": lambda n: LlamaRMSNorm(n, eps=1e-6),
    "olmo2": lambda n: Olmo2RMSNorm(n, eps=1e-6),
    "gemma": lambda n: GemmaRMSNorm(n, eps=1e-6),
    "t5": lambda n: T5LayerNorm(n, eps=1e-6),
    "l2": lambda n: Llama4TextL2Norm(eps=1e-6),
    "layer_norm": lambda n: nn.LayerNorm(n, eps=1e-5),
}


def make(name, hidden_size, dtype):
    torch.manual_seed(hidden_size)
    norm = MODULES[name](hidden_size).to(DEVICE, dtype)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return norm


def random(*shape, dtype=BF16, seed=0):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    values = torch.randn(shape, generator=generator, device=DEVICE)
    return (values * 1.7 + 0.25).to(dtype)


def fuse(norm):
    """A patched copy of a norm, and the formula it was recognised to compute."""
    fused = copy.deepcopy(norm)
    (record,) = patch_model(fused).swapped
    return fused, record.formula


def run(norm, x, dy):
    """[y, dx, gradients of the parameters]."""
    x = x.detach().requires_grad_()
    y = norm(x)
    leaves = [x, *norm.parameters()]
    gradients = torch.autograd.grad(y, leaves, dy.to(y.dtype))
    return [y.detach(), *gradients]


def run_fused(norm, x, dy):
    """As `run`, by exactly one forward kernel, and with dy left as it was."""
    before = dy.clone()
    with count_launches() as launches:
        results = run(norm, x, dy)
    assert launches["norm_forward"] == 1
    assert torch.equal(dy, before), "the incoming gradient was overwritten"
    return results
