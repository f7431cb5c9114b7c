"""NormSpec and the plain-torch formulas: worked examples, closed-form gradients, the
live classes bit for bit.
"""

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from hf_rmsnorm import NormSpec, layer_norm, rms_norm, use_backend
from hf_rmsnorm.reference import reference_backward, reference_norm, reference_stats

CLASSES = {
    "llama": (LlamaRMSNorm, NormSpec(False, 1e-6, rounding="before_weight")),
    "olmo2": (Olmo2RMSNorm, NormSpec(False, 1e-6, rounding="once")),
    "gemma": (GemmaRMSNorm, NormSpec(False, 1e-6, weight_offset=1.0)),
    "t5": (T5LayerNorm, NormSpec(False, 1e-6, rounding="weight_dtype")),
    "layer_norm": (
        lambda n: nn.LayerNorm(n, eps=1e-6),
        NormSpec(True, 1e-6, has_bias=True, functional=True),
    ),
    "torch_rms": (
        lambda n: nn.RMSNorm(n, eps=1e-6),
        NormSpec(False, 1e-6, functional=True),
    ),
}


@pytest.mark.parametrize(
    ("x", "rms", "expected"),
    [
        ([1.0, 2.0, 3.0, 4.0], 2.7386, [0.3651, 0.7303, 1.0954, 1.4606]),
        ([3.0, -1.0, 4.0, -2.0], 2.7386, [1.0954, -0.3651, 1.4606, -0.7303]),
    ],
)
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_worked_examples_of_the_literature(x, rms, expected, backend):
    x = torch.tensor(x)
    rstd, mean = reference_stats(x, NormSpec(False, 0.0))
    assert mean is None
    assert 1 / rstd.item() == pytest.approx(rms, abs=5e-5)
    with use_backend(backend):
        torch.testing.assert_close(
            rms_norm(x, torch.ones(4), eps=0.0),
            torch.tensor(expected),
            atol=5e-5,
            rtol=0,
        )


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_rms_gradient_is_the_closed_form(backend):
    """dx = [gamma dy - x / (D r^2) * sum(gamma dy x)] / r, which is the literature's
    form with gamma moved inside.
    """
    generator = torch.Generator().manual_seed(0)
    x, dy = (
        torch.randn(3, 16, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    gamma = torch.randn(16, generator=generator, dtype=torch.float64)
    r = x.square().mean(-1, keepdim=True).sqrt()
    expected = (
        gamma * dy - x / (16 * r**2) * (gamma * dy * x).sum(-1, keepdim=True)
    ) / r
    x32 = x.float().requires_grad_()
    with use_backend(backend):
        (dx,) = torch.autograd.grad(
            rms_norm(x32, gamma.float(), eps=0.0), x32, dy.float()
        )
    torch.testing.assert_close(dx.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_reference_is_the_live_class_bit_for_bit(name, x_dtype, weight_dtype):
    make, spec = CLASSES[name]
    torch.manual_seed(1)
    module = make(96)
    for parameter in module.parameters():
        nn.init.normal_(parameter, 0.3, 0.4)
    module = module.to(weight_dtype)
    x = (torch.randn(5, 7, 96) * 2 + 0.5).to(x_dtype)
    if (
        name == "layer_norm"
        and weight_dtype == torch.bfloat16
        and x_dtype != torch.bfloat16
    ):
        with pytest.raises(RuntimeError):
            # F.layer_norm itself refuses this mixture on the CPU
            module(x)
        return
    expected = module(x)
    y = reference_norm(x, module.weight, getattr(module, "bias", None), spec)
    assert y.dtype == expected.dtype == spec.output_dtype(x_dtype, weight_dtype)
    assert torch.equal(y, expected)


@pytest.mark.parametrize("name", CLASSES)
def test_closed_form_backward_agrees_with_autograd_in_float64(name):
    _, spec = CLASSES[name]
    torch.manual_seed(2)
    x, weight, bias = (
        torch.randn(4, 3, 24).double(),
        torch.randn(24).double(),
        torch.randn(24).double(),
    )
    dy = torch.randn(4, 3, 24).double()
    bias = bias if spec.has_bias else None
    inputs = [t.requires_grad_() for t in (x, weight, bias) if t is not None]
    expected = torch.autograd.grad(reference_norm(x, weight, bias, spec), inputs, dy)
    grads = reference_backward(
        dy, x.detach(), weight.detach(), bias, spec, (True, True, spec.has_bias, False)
    )
    for got, want in zip([g for g in grads if g is not None], expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("function", [rms_norm, layer_norm])
def test_gradcheck_in_float64(function):
    torch.manual_seed(3)
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    weight, bias = (
        torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(2)
    )
    assert torch.autograd.gradcheck(
        lambda *a: function(a[0], a[1], bias=a[2]), (x, weight, bias)
    )
    assert torch.autograd.gradgradcheck(
        lambda *a: function(a[0], a[1], bias=a[2]), (x, weight, bias)
    )


def test_spec_reads_like_a_formula():
    assert str(NormSpec(False, 1e-5, rounding="before_weight")).startswith(
        "RMSNorm(eps=1e-05"
    )
    assert str(NormSpec(True, 1e-5, has_bias=True, functional=True)).startswith(
        "LayerNorm("
    )
    assert NormSpec(False, 0.0).with_eps(1e-3).eps == 1e-3
    assert NormSpec(False, 1e-6).to_dict()["kind"] == "RMSNorm"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"eps": -1e-6}, "eps is -1e-06"),
        ({"eps": float("nan")}, "eps is nan"),
        ({"eps": float("inf")}, "eps is inf"),
        ({"eps": 1e-6, "rounding": "twice"}, "rounding is 'twice'"),
        ({"eps": 1e-6, "has_weight": False, "weight_offset": 1.0}, "without weight"),
    ],
)
def test_a_spec_that_means_nothing_is_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        NormSpec(centered=False, **fields)
