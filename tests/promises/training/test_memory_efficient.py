"""`patch_model(model, memory_efficient=True)`: the backward reads the norm's output,
where that serves.
"""

import copy
import pickle

import pytest
import tiny_models
import torch
import torch.nn.functional as F
from tolerance import FACTOR, assert_as_accurate
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from hf_rmsnorm import patch_model, unpatch_model, use_backend

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
    generator = torch.Generator().manual_seed(0)
    module = MODULES[name](hidden_size).to(dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            spread = 0.3 * torch.randn(hidden_size, generator=generator)
            parameter.copy_(spread + (name != "gemma"))
        module.weight[: hidden_size // 4].neg_().sub_(2 * (name == "gemma"))
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
    assert keeps_input != (y.data_ptr() in saved)
    return "input" if keeps_input else "output"


def gradients(module, x, dy):
    x = x.detach().requires_grad_()
    wanted = [x, *(p for p in module.parameters() if p.requires_grad)]
    y = module(x)
    return torch.autograd.grad(y, wanted, dy.to(y.dtype))


def check(module, x, dy):
    """The gradients of a patched module against float64, judged by what it computes
    unpatched: of the parameters, in several orders of the rows.
    """
    fused = gradients(module, x, dy)
    eager = copy.deepcopy(module)
    unpatch_model(eager)
    with use_backend("reference"):
        # the class's own forward computes float32 whatever it is given
        double = copy.deepcopy(module).double()
        exact = gradients(double, x.double(), dy.double())
    reordered = []
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(x), generator=generator).to(x.device)
        reordered.append(gradients(eager, x[order], dy[order]))
    expected = gradients(eager, x, dy)
    for i, ours in enumerate(fused):
        others = [run[i] for run in reordered] if i else []
        assert_as_accurate(ours, expected[i], exact[i], f"gradient {i}", others)


def rows(*shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed + 1)
    return (torch.randn(shape, generator=generator) * 1.7 + 0.25).to(dtype)


def operands(hidden_size=96, dtype=torch.bfloat16):
    x = rows(24, hidden_size, dtype=dtype).requires_grad_()
    dy = rows(24, hidden_size, dtype=dtype, seed=7)
    return x, dy


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODULES)
def test_gradients_of_hugging_faces_modules(name, dtype):
    module = build(name, dtype=dtype)
    report = patch_model(module, memory_efficient=True)
    assert "keeps its output for backward" in report.swapped[0].notes
    x, dy = operands(dtype=dtype)
    assert kept(module, x) == "output"
    check(module, x, dy)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama", "layer_norm"])
def test_the_worst_weights_and_gradients_that_are_served(name, dtype):
    """Weights over three decades, biases of four times the weight, and most of the
    gradient along the output.
    """
    module, (x, dy) = build(name, 512, dtype), operands(512, dtype)
    with torch.no_grad():
        module.weight.mul_(torch.logspace(-2.0, 0.0, 512).to(dtype))
        if name == "layer_norm":
            module.bias.copy_(3.9 * module.weight.abs())
    patch_model(module, memory_efficient=True)
    assert kept(module, x) == "output"
    check(module, x, dy)
    xhat = F.rms_norm(x.detach().float(), [512])
    along_the_output = 0.9 * xhat + 0.25 * dy.float()
    dy = along_the_output / module.weight.detach().float()
    check(module, x, dy.to(dtype))


def spoil(module, what):
    with torch.no_grad():
        if what == "bias":
            module.bias[3] = 4.1 * module.weight[3]
        elif what == "all":
            module.weight.mul_(1e-6)
        else:
            module.weight[3] = what


REASONS = {
    0.0: "weight is below 0.001",
    5e-4: "weight is below 0.001",
    "all": "weight is below",
    "bias": "bias is above",
}


@pytest.mark.parametrize("what", REASONS)
def test_a_weight_that_hides_the_input_has_it_kept(what):
    module, (x, dy) = build("layer_norm"), operands()
    spoil(module, what)
    report = patch_model(module, memory_efficient=True)
    assert f"keeps its input for backward: a {REASONS[what]}" in report.swapped[0].notes
    assert kept(module, x) == "input"
    check(module, x, dy)


def test_what_is_kept_is_decided_when_the_model_is_patched():
    module, (x, _) = build("layer_norm"), operands()
    patch_model(module, memory_efficient=True)
    spoil(module, 0.0)
    assert kept(module, x) == "output"
    patch_model(module)
    assert kept(module, x) == "input"


def test_an_output_of_another_dtype_or_order_of_rows_does_not_serve():
    module = build(dtype=torch.float32)
    patch_model(module, memory_efficient=True)
    assert kept(module, operands(dtype=torch.bfloat16)[0]) == "input"
    packed = rows(2, 5, 3, 96, dtype=torch.float32)
    for x in (packed[:, :, 0], packed.transpose(1, 2)):
        check(module, x, rows(*x.shape, dtype=torch.float32, seed=7))


def test_an_output_that_is_changed_before_the_backward_is_an_error():
    module, (x, dy) = build(), operands()
    patch_model(module, memory_efficient=True)
    y = module(x)
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


def test_a_second_derivative_says_what_it_needs():
    module, (x, dy) = build(), operands()
    patch_model(module, memory_efficient=True)
    with pytest.raises(RuntimeError, match="memory_efficient=False"):
        torch.autograd.grad(module(x), x, dy, create_graph=True)
    patch_model(module, memory_efficient=False)
    (dx,) = torch.autograd.grad(module(x), x, dy, create_graph=True)
    (second,) = torch.autograd.grad(dx.float().square().sum(), x)
    assert second.isfinite().all()


def gradients_of_a_model(model):
    ids = tiny_models.token_ids(1, 9)
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    return tiny_models.gradients(model)


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "gemma2"])
def test_gradients_of_whole_models(family):
    """By the RMS error of each gradient: the largest one of so many is luck, without
    `memory_efficient` too.
    """
    model = tiny_models.build(family, torch.bfloat16)
    eager = gradients_of_a_model(model)
    report = patch_model(model, memory_efficient=True)
    assert all("for backward" in record.notes for record in report.swapped)
    fused = gradients_of_a_model(model)
    with use_backend("reference"):
        exact = gradients_of_a_model(model.double())
    for name, right in exact.items():
        ours = (fused[name] - right).square().mean().sqrt()
        theirs = (eager[name] - right).square().mean().sqrt()
        assert ours <= FACTOR * theirs, name


def test_copies_and_pickles_keep_it():
    module, (x, _) = build(), operands()
    patch_model(module, memory_efficient=True)
    assert kept(copy.deepcopy(module), x) == "output"
    assert kept(pickle.loads(pickle.dumps(module)), x) == "output"


def test_a_norm_that_keeps_a_strided_input_after_one_alike_that_kept_its_output():
    """Their formula is one; what the two keep lies otherwise in memory."""
    norms = nn.ModuleList(nn.LayerNorm(72) for _ in range(2))
    with torch.no_grad():
        norms[1].weight[3] = 0.0  # it keeps its input
    x = torch.randn(2, 72, 5).transpose(1, 2)
    dy = torch.linspace(-1.0, 1.0, x.numel()).view(x.shape)
    expected = [gradients(norm, x, dy) for norm in norms]
    patch_model(norms, memory_efficient=True)
    for norm, eager in zip(norms, expected, strict=True):
        torch.testing.assert_close(gradients(norm, x, dy), eager)
