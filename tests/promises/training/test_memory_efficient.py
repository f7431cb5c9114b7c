"""`patch_model(model, memory_efficient=True)`: the backward reads the norm's output,
where that serves.
"""

import pytest
import torch
import torch.nn.functional as F
from judged import judge
from torch import nn
from torch.func import functional_call
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from hf_rmsnorm import patch_model, use_backend
from hf_rmsnorm.reference import reference_norm

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MODULES = {
    "llama": LlamaRMSNorm,
    "gemma": Gemma2RMSNorm,
    "olmo2": Olmo2RMSNorm,
    "t5": T5LayerNorm,
    "layer_norm": nn.LayerNorm,
}


@pytest.fixture(autouse=True)
def kernels():
    with use_backend("triton"):
        yield


def build(name="llama", hidden_size=96, dtype=torch.bfloat16):
    """A norm with weights of both signs, none of them small."""
    module = MODULES[name](hidden_size).to(dtype)
    generator = torch.Generator().manual_seed(0)
    offset = 0.0
    if name == "gemma":
        offset = 1.0
    with torch.no_grad():
        for parameter in module.parameters():
            values = torch.randn(hidden_size, generator=generator)
            scale = 1.0 + 0.3 * values
            parameter.copy_(scale - offset)
        first = module.weight[: hidden_size // 4]
        scale = first + offset
        first.copy_(-scale - offset)
    return module


def kept(module, x):
    """Which the module saves for backward: "input" or "output"."""
    saved = []

    def pack(t):
        saved.append(t.data_ptr())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = module(x)
    keeps_input = x.data_ptr() in saved
    keeps_output = y.data_ptr() in saved
    assert keeps_input != keeps_output
    if keeps_input:
        return "input"
    return "output"


def gradients(module, x, dy):
    x = x.detach().requires_grad_()
    y = module(x)
    dy = dy.to(y.dtype)
    leaves = [x, *module.parameters()]
    return torch.autograd.grad(y, leaves, dy)


def check(module, x, dy):
    """The output and the gradients of a patched module against float64."""
    (record,) = patch_model(module).swapped
    names = [name for name, _ in module.named_parameters()]

    def fused(x, *parameters):
        given = dict(zip(names, parameters, strict=True))
        return (functional_call(module, given, x),)

    def plain(x, weight, bias=None):
        return (reference_norm(x, weight, bias, record.formula),)

    judge(fused, plain, (x, *module.parameters()), (dy,))


def rows(*shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed + 1)
    values = torch.randn(shape, generator=generator)
    values = values * 1.7 + 0.25
    return values.to(dtype)


def operands(hidden_size=96, dtype=torch.bfloat16):
    x = rows(24, hidden_size, dtype=dtype)
    dy = rows(24, hidden_size, dtype=dtype, seed=7)
    return x.requires_grad_(), dy


def notes(report):
    """Those of the first norm."""
    return report.swapped[0].notes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODULES)
def test_gradients_of_hugging_faces_modules(name, dtype):
    module = build(name, dtype=dtype)
    x, dy = operands(dtype=dtype)
    report = patch_model(module, memory_efficient=True)
    assert "keeps its output for backward" in notes(report)
    assert kept(module, x) == "output"
    check(module, x, dy)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama", "layer_norm"])
def test_the_worst_weights_and_gradients_that_are_served(name, dtype):
    """Weights over three decades, biases of four times the weight, and most of the
    gradient along the output.
    """
    module = build(name, 512, dtype)
    x, dy = operands(512, dtype)
    with torch.no_grad():
        decades = torch.logspace(-2.0, 0.0, 512)
        module.weight.mul_(decades.to(dtype))
        if name == "layer_norm":
            module.bias.copy_(3.9 * module.weight.abs())
    patch_model(module, memory_efficient=True)
    assert kept(module, x) == "output"
    check(module, x, dy)
    xhat = F.rms_norm(x.detach().float(), [512])
    along_the_output = 0.9 * xhat + 0.25 * dy.float()
    weight = module.weight.detach().float()
    dy = along_the_output / weight
    check(module, x, dy.to(dtype))


def a_zero(module):
    module.weight[3] = 0.0


def test_a_weight_that_hides_the_input_has_it_kept():
    """The bounds: `tests/unit/ops/test_limits_from_output.py`."""
    module = build("layer_norm")
    x, dy = operands()
    with torch.no_grad():
        a_zero(module)
    report = patch_model(module, memory_efficient=True)
    assert "its input for backward: a weight is below 0.001" in notes(report)
    assert kept(module, x) == "input"
    check(module, x, dy)


def test_what_is_kept_is_decided_when_the_model_is_patched():
    module = build("layer_norm")
    x, _ = operands()
    patch_model(module, memory_efficient=True)
    with torch.no_grad():
        a_zero(module)
    assert kept(module, x) == "output"
    patch_model(module)
    assert kept(module, x) == "input"


def test_an_output_of_another_dtype_or_order_of_rows_does_not_serve():
    module = build(dtype=torch.float32)
    patch_model(module, memory_efficient=True)
    x, _ = operands(dtype=torch.bfloat16)
    assert kept(module, x) == "input"
    packed = rows(2, 5, 3, 96, dtype=torch.float32)
    first = packed[:, :, 0]
    transposed = packed.transpose(1, 2)
    for x in (first, transposed):
        dy = rows(*x.shape, dtype=torch.float32, seed=7)
        check(module, x, dy)


def test_an_output_that_is_changed_before_the_backward_is_an_error():
    module = build()
    x, dy = operands()
    patch_model(module, memory_efficient=True)
    y = module(x)
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


def test_a_second_derivative_says_what_it_needs():
    module = build()
    x, dy = operands()
    patch_model(module, memory_efficient=True)
    y = module(x)
    with pytest.raises(RuntimeError, match="memory_efficient=False"):
        torch.autograd.grad(y, x, dy, create_graph=True)
    patch_model(module, memory_efficient=False)
    y = module(x)
    (dx,) = torch.autograd.grad(y, x, dy, create_graph=True)
    penalty = dx.float().square().sum()
    (second,) = torch.autograd.grad(penalty, x)
    assert second.isfinite().all()


def test_a_norm_that_keeps_a_strided_input_after_one_alike_that_kept_its_output():
    """Their formula is one; what the two keep lies otherwise in memory."""
    keeps_output = nn.LayerNorm(72)
    keeps_input = nn.LayerNorm(72)
    with torch.no_grad():
        keeps_input.weight[3] = 0.0
    norms = nn.ModuleList([keeps_output, keeps_input])
    x = torch.randn(2, 72, 5).transpose(1, 2)
    dy = torch.randn(2, 5, 72)
    expected = [gradients(norm, x, dy) for norm in norms]
    patch_model(norms, memory_efficient=True)
    results = [gradients(norm, x, dy) for norm in norms]
    torch.testing.assert_close(results, expected)
