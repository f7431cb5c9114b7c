"""The plain-torch formulas: worked examples, closed-form gradients, the live classes bit
for bit.
"""

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from hf_rmsnorm import NormSpec, layer_norm, rms_norm, use_backend
from hf_rmsnorm.reference import reference_norm

CLASSES = {
    "llama": (LlamaRMSNorm, NormSpec(False, 1e-6, rounding="before_weight")),
    "olmo2": (Olmo2RMSNorm, NormSpec(False, 1e-6, rounding="once")),
    "gemma": (GemmaRMSNorm, NormSpec(False, 1e-6, weight_offset=1.0)),
    "t5": (T5LayerNorm, NormSpec(False, 1e-6, rounding="weight_dtype")),
    "layer_norm": (nn.LayerNorm, NormSpec(True, 1e-6, has_bias=True, functional=True)),
    "torch_rms": (nn.RMSNorm, NormSpec(False, 1e-6, functional=True)),
}


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# x and its norm without a weight; the RMS of both is 2.7386
EXAMPLES = [
    ([1.0, 2.0, 3.0, 4.0], [0.3651, 0.7303, 1.0954, 1.4606]),
    ([3.0, -1.0, 4.0, -2.0], [1.0954, -0.3651, 1.4606, -0.7303]),
]


@pytest.mark.parametrize(("x", "expected"), EXAMPLES)
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_worked_examples_of_the_literature(x, expected, backend):
    x = torch.tensor(x)
    expected = torch.tensor(expected)
    with use_backend(backend):
        y = rms_norm(x, torch.ones(4), eps=0.0)
    torch.testing.assert_close(y, expected, atol=5e-5, rtol=0)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_reference_is_the_live_class_bit_for_bit(name, x_dtype, weight_dtype):
    cls, spec = CLASSES[name]
    torch.manual_seed(1)
    module = cls(96, eps=1e-6)
    for parameter in module.parameters():
        nn.init.normal_(parameter, 0.3, 0.4)
    module = module.to(weight_dtype)
    x = torch.randn(5, 7, 96) * 2 + 0.5
    x = x.to(x_dtype)
    try:
        expected = module(x)
    except RuntimeError:  # F.layer_norm refuses a mixture on the CPU
        assert name == "layer_norm"
        assert weight_dtype == torch.bfloat16
        assert x_dtype != weight_dtype
        return
    bias = getattr(module, "bias", None)
    y = reference_norm(x, module.weight, bias, spec)
    assert y.dtype == expected.dtype
    assert y.dtype == spec.output_dtype(x_dtype, weight_dtype)
    assert torch.equal(y, expected)


@pytest.mark.parametrize("function", [rms_norm, layer_norm])
def test_gradcheck_in_float64(function):
    torch.manual_seed(3)
    leaves = []
    for shape in ([2, 3, 5], [5], [5]):
        tensor = torch.randn(shape, dtype=torch.float64)
        leaves.append(tensor.requires_grad_())

    def call(x, weight, bias):
        return function(x, weight, bias=bias)

    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves)
