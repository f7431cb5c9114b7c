"""`patch_model(model, memory_efficient=True)`: the backward reads the norm's output,
where that serves.
"""

import copy
import pickle

import pytest
import tiny_models
import torch
from tolerance import FACTOR, assert_as_accurate
from torch import nn
from torch.nn.utils import parametrize
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from hf_rmsnorm import patch_model, unpatch_model, use_backend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
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
    module = MODULES[name](hidden_size).to(DEVICE, dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(
                torch.randn(hidden_size, generator=generator) * 0.3 + (name != "gemma")
            )
        module.weight[: hidden_size // 4].neg_().sub_(2 * (name == "gemma"))
    return module


def kept(module, x, *arguments):
    """ "input" or "output": which of them the module saves for backward."""
    saved = set()

    def pack(t):
        saved.add(t.data_ptr())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = module(x, *arguments)
    (which,) = [
        name for name, t in (("input", x), ("output", y)) if t.data_ptr() in saved
    ]
    return which


def gradients(module, x, dy):
    x = x.detach().requires_grad_()
    wanted = [x, *(p for p in module.parameters() if p.requires_grad)]
    y = module(x)
    return torch.autograd.grad(y, wanted, dy.to(y.dtype))


def check(module, x, dy):
    """The gradients of a patched module against float64, judged by what it computes
    unpatched.
    """
    fused = gradients(module, x, dy)
    eager = copy.deepcopy(module)
    unpatch_model(eager)
    with use_backend("reference"):
        # the class's own forward computes float32 whatever it is given
        exact = gradients(copy.deepcopy(module).double(), x.double(), dy.double())
    orders = [
        torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).to(
            x.device
        )
        for seed in range(4)
    ]
    others = [gradients(eager, x[order], dy[order])[1:] for order in orders]
    for i, (ours, theirs, right) in enumerate(
        zip(fused, gradients(eager, x, dy), exact, strict=True)
    ):
        assert_as_accurate(
            ours,
            theirs,
            right,
            f"gradient {i}",
            [o[i - 1] for o in others] if i else [],
        )


def rows(*shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed + 1)
    return (torch.randn(shape, generator=generator) * 1.7 + 0.25).to(DEVICE, dtype)


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


@pytest.mark.parametrize(
    "hidden_size", [39, 1000, pytest.param(8192, marks=pytest.mark.full)]
)
def test_every_width(hidden_size):
    module = build(hidden_size=hidden_size)
    patch_model(module, memory_efficient=True)
    x, dy = operands(hidden_size)
    check(module, x, dy)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama", "olmo2", "layer_norm"])
def test_the_worst_weights_and_gradients_that_are_served(name, dtype):
    """Weights over three decades, biases of four times the weight, and most of the
    gradient along the output.
    """
    module, (x, dy) = build(name, 512, dtype), operands(512, dtype)
    with torch.no_grad():
        module.weight.mul_(torch.logspace(-2.0, 0.0, 512, device=DEVICE).to(dtype))
        if name == "layer_norm":
            module.bias.copy_(3.9 * module.weight.abs())
    patch_model(module, memory_efficient=True)
    assert kept(module, x) == "output"
    check(module, x, dy)
    xhat = (
        x.detach().float() / x.detach().float().square().mean(-1, keepdim=True).sqrt()
    )
    check(
        module,
        x,
        ((0.9 * xhat + 0.25 * dy.float()) / module.weight.detach().float()).to(dtype),
    )


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


def prune(parameter):
    parameter.data[3] = 0.0


@pytest.mark.parametrize("name", ["llama", "layer_norm"])
def test_a_weight_that_becomes_zero_past_its_version_in_the_middle_of_a_step_gives_no_nan(
    name,
):
    module, (x, dy) = build(name), operands()
    patch_model(module, memory_efficient=True)
    x = x.detach().requires_grad_()
    y = module(x)
    prune(module.weight)
    y.backward(dy)
    assert all(t.grad.isfinite().all() for t in (x, *module.parameters()))


def test_formulas_that_need_their_input_keep_it():
    class Textbook(LlamaRMSNorm):
        def forward(self, x):
            return self.weight * (
                x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon)
            )

    module = Textbook(96, eps=1e-3).to(DEVICE)
    report = patch_model(module, memory_efficient=True)
    assert (
        "keeps its input for backward: its formula has eps_outside"
        in report.swapped[0].notes
    )
    assert kept(module, operands(dtype=torch.float32)[0]) == "input"


def test_an_output_of_another_dtype_or_order_of_rows_does_not_serve():
    module = build(dtype=torch.float32)
    patch_model(module, memory_efficient=True)
    assert kept(module, operands(dtype=torch.bfloat16)[0]) == "input"
    packed = rows(2, 5, 3, 96, dtype=torch.float32)
    for x in (
        packed[:, :, 0],
        packed.transpose(1, 2),
        packed[:1, :1].expand(2, 5, 3, 96),
    ):
        check(module, x, rows(*x.shape, dtype=torch.float32, seed=7))


def test_a_parametrized_or_frozen_weight_and_an_input_without_gradient():
    module, (x, dy) = build(), operands()
    module.weight.requires_grad_(False)
    patch_model(module, memory_efficient=True)
    assert kept(module, x) == "output"
    check(module, x, dy)
    module.weight.requires_grad_(True)
    assert kept(module, x.detach()) == "output"
    parametrize.register_parametrization(module, "weight", nn.Identity())
    assert kept(module, x) == "output"


def test_changes_between_forward_and_backward_are_an_error():
    module, (x, dy) = build(), operands()
    patch_model(module, memory_efficient=True)
    y = module(x)
    spoil(module, 1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)
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
    assert torch.autograd.grad(dx.float().square().sum(), x)[0].isfinite().all()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_whole_models(family, dtype):
    """By the RMS error of each gradient: the largest one of so many is luck, without
    `memory_efficient` too.
    """
    ids = tiny_models.token_ids(2, 9).to(DEVICE)

    def run(model):
        model.to(DEVICE).train().zero_grad()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        model(ids, labels=ids).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    model = tiny_models.build(family, dtype)
    eager = run(model)
    report = patch_model(model, memory_efficient=True)
    assert all("for backward" in record.notes for record in report.swapped)
    fused = run(model)
    with use_backend("reference"):
        exact = run(model.double())
    for name, right in exact.items():
        ours, theirs = (
            (grads[name].double() - right).square().mean().sqrt()
            for grads in (fused, eager)
        )
        assert ours <= FACTOR * theirs, name


def test_compiled_code_is_as_without():
    module, (x, dy) = build(), operands()
    patch_model(module)
    expected = gradients(
        torch.compile(module, backend="aot_eager", fullgraph=True), x, dy
    )
    torch.compiler.reset()
    patch_model(module, memory_efficient=True)
    compiled = gradients(
        torch.compile(module, backend="aot_eager", fullgraph=True), x, dy
    )
    assert all(torch.equal(a, b) for a, b in zip(compiled, expected, strict=True))


def test_copies_and_pickles_keep_it():
    module, (x, _) = build(), operands()
    patch_model(module, memory_efficient=True)
    assert kept(copy.deepcopy(module), x) == "output"
    assert kept(pickle.loads(pickle.dumps(module)), x) == "output"


def test_a_norm_that_keeps_a_strided_input_after_one_alike_that_kept_its_output():
    """Their plans are one; what the two keep lies otherwise in memory."""
    norms = torch.nn.ModuleList(torch.nn.LayerNorm(72) for _ in range(2))
    with torch.no_grad():
        norms[1].weight[3] = 0.0  # it keeps its input
    x = torch.randn(2, 72, 5, requires_grad=True)

    def gradients(norm):
        y = norm(x.transpose(1, 2))
        return torch.autograd.grad(
            y, [x, norm.weight], torch.linspace(-1.0, 1.0, y.numel()).view(y.shape)
        )

    expected = [gradients(norm) for norm in norms]
    patch_model(norms, memory_efficient=True)
    for norm, each in zip(norms, expected, strict=True):
        torch.testing.assert_close(gradients(norm), each)
