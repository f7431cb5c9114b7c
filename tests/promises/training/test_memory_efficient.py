"""`patch_model(model, memory_efficient=True)`: the backward reads the norm's output, where that serves."""

import copy
import pickle

import pytest
import tiny_models
import torch
from tolerance import FACTOR, assert_as_accurate
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from hf_rmsnorm import patch_model, patched, unpatch_model, use_backend
from hf_rmsnorm.kernels.serves import unserved
from hf_rmsnorm.ops import fused_add_norm, fused_norm
from tests.unit.kernels import test_kernels
from tests.unit.kernels.test_kernels import DTYPES, SPECS, parameters, rows
from tests.unit.ops import test_add_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MODULES = {
    "llama": LlamaRMSNorm,
    "gemma": Gemma2RMSNorm,
    "olmo2": Olmo2RMSNorm,
    "t5": T5LayerNorm,
    "layer_norm": nn.LayerNorm,
}
SERVED = [name for name, spec in SPECS.items() if unserved(spec, "from the output") is None]


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
            parameter.copy_(torch.randn(hidden_size, generator=generator) * 0.3 + (name != "gemma"))
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
    (which,) = [name for name, t in (("input", x), ("output", y)) if t.data_ptr() in saved]
    return which


def gradients(module, x, dy):
    x = x.detach().requires_grad_()
    wanted = [x, *(p for p in module.parameters() if p.requires_grad)]
    y = module(x)
    return torch.autograd.grad(y, wanted, dy.to(y.dtype))


def check(module, x, dy):
    """The gradients of a patched module against float64, judged by what it computes unpatched."""
    fused = gradients(module, x, dy)
    eager = copy.deepcopy(module)
    unpatch_model(eager)
    with use_backend("reference"):  # the class's own forward computes float32 whatever it is given
        exact = gradients(copy.deepcopy(module).double(), x.double(), dy.double())
    orders = [torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).to(x.device) for seed in range(4)]
    others = [gradients(eager, x[order], dy[order])[1:] for order in orders]
    for i, (ours, theirs, right) in enumerate(zip(fused, gradients(eager, x, dy), exact, strict=True)):
        assert_as_accurate(ours, theirs, right, f"gradient {i}", [o[i - 1] for o in others] if i else [])


def served_parameters(spec, hidden_size, dtype):
    weight, bias = parameters(spec, hidden_size, dtype)
    with torch.no_grad():
        scale = torch.ones(1) if weight is None else weight + spec.weight_offset
        if weight is not None:
            weight[scale.abs() < 0.05] = 0.05 - spec.weight_offset
        if bias is not None:
            bias.copy_(bias.clamp(-3.9 * scale.abs(), 3.9 * scale.abs()))
    return weight, bias


def operands(hidden_size=96, dtype=torch.bfloat16):
    return rows(24, hidden_size, dtype=dtype).requires_grad_(), rows(24, hidden_size, dtype=dtype, seed=7)


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
@pytest.mark.parametrize("name", SERVED)
def test_every_formula_in_every_dtype(name, dtype, monkeypatch):
    monkeypatch.setattr(test_kernels, "fused_norm", lambda *a: fused_norm(*a, keep_output=True))
    monkeypatch.setattr(test_add_norm, "fused_add_norm", lambda *a: fused_add_norm(*a, keep_output=True))
    weight, bias = served_parameters(SPECS[name], 96, dtype)
    x, dy = operands(dtype=dtype)
    test_kernels.check(SPECS[name], x, weight, bias, dy)
    test_add_norm.check(
        SPECS[name], *test_add_norm.operands((3, 5, 96), dtype)[:2], weight, bias, None, dy[:15].view(3, 5, 96)
    )
    x, residual, dh, dy = test_add_norm.operands((3, 5, 96), dtype)
    test_add_norm.check(SPECS[name], x, residual, weight, bias, dh, dy)


@pytest.mark.parametrize(
    "hidden_size", [32, 39, 128, 1000, *(pytest.param(n, marks=pytest.mark.full) for n in (4096, 8192, 14336))]
)
@pytest.mark.parametrize("name", ["llama", "gemma", "layer_norm", "no_weight"])
def test_every_width(name, hidden_size, monkeypatch):
    monkeypatch.setattr(test_kernels, "fused_norm", lambda *a: fused_norm(*a, keep_output=True))
    monkeypatch.setattr(test_add_norm, "fused_add_norm", lambda *a: fused_add_norm(*a, keep_output=True))
    weight, bias = served_parameters(SPECS[name], hidden_size, torch.bfloat16)
    x, residual, dh, dy = test_add_norm.operands((5, hidden_size), torch.bfloat16)
    test_kernels.check(SPECS[name], x, weight, bias, dy)
    test_add_norm.check(SPECS[name], x, residual, weight, bias, dh, dy)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama", "olmo2", "layer_norm"])
def test_the_worst_weights_and_gradients_that_are_served(name, dtype):
    """Weights over three decades, biases of four times the weight, and most of the gradient along the output."""
    module, (x, dy) = build(name, 512, dtype), operands(512, dtype)
    with torch.no_grad():
        module.weight.mul_(torch.logspace(-2.0, 0.0, 512, device=DEVICE).to(dtype))
        if name == "layer_norm":
            module.bias.copy_(3.9 * module.weight.abs())
    patch_model(module, memory_efficient=True)
    assert kept(module, x) == "output"
    check(module, x, dy)
    xhat = x.detach().float() / x.detach().float().square().mean(-1, keepdim=True).sqrt()
    check(module, x, ((0.9 * xhat + 0.25 * dy.float()) / module.weight.detach().float()).to(dtype))


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
def test_a_weight_that_becomes_zero_past_its_version_in_the_middle_of_a_step_gives_no_nan(name):
    module, (x, dy) = build(name), operands()
    patch_model(module, memory_efficient=True)
    x = x.detach().requires_grad_()
    y = module(x)
    prune(module.weight)
    y.backward(dy)
    assert all(t.grad.isfinite().all() for t in (x, *module.parameters()))


class FlatBuffer:
    """Weights as views of one buffer that the optimizer alone writes to, as DeepSpeed ZeRO-1 and ZeRO-2 keep them."""

    def __init__(self, parameters):
        self.parameters = list(parameters)
        self.flat = torch.cat([p.detach().flatten() for p in self.parameters])
        at = 0
        for p in self.parameters:
            p.data = self.flat[at : at + p.numel()].view(p.shape)
            at += p.numel()

    def step(self):
        self.flat.sub_(torch.cat([p.grad.flatten() for p in self.parameters]), alpha=0.5)
        self.flat[3::96] = 0.0

    def zero_grad(self):
        for p in self.parameters:
            p.grad = None


class EightBitAdam:
    """bitsandbytes writes through raw pointers."""

    def __init__(self, parameters):
        bitsandbytes = pytest.importorskip("bitsandbytes")
        self.parameters = list(parameters)
        self.adam = bitsandbytes.optim.Adam8bit(self.parameters, lr=0.2, min_8bit_size=0)
        self.zero_grad = self.adam.zero_grad

    def step(self):
        before = [p._version for p in self.parameters]
        self.adam.step()
        assert [p._version for p in self.parameters] == before


@pytest.mark.full
@pytest.mark.parametrize("optimizer", [FlatBuffer, EightBitAdam])
def test_optimizers_that_write_past_versions_train_as_without(optimizer):
    found = []
    for memory_efficient in (False, True):
        model = nn.Sequential(*(build("llama") for _ in range(3)), build("layer_norm"))
        patch_model(model, memory_efficient=memory_efficient)
        steps, (x, dy) = optimizer(model.parameters()), operands()
        for _ in range(6):  # large ones: some weights come near zero on their way to the other side
            steps.zero_grad()
            model(x).backward(dy)
            steps.step()
        assert all(p.isfinite().all() for p in model.parameters())
        found.append([p.grad.float() for p in model.parameters()])
    for kept_output, kept_input in zip(*reversed(found), strict=True):
        assert (kept_output - kept_input).norm() < 0.1 * kept_input.norm()


def test_formulas_that_need_their_input_keep_it():
    class Textbook(LlamaRMSNorm):
        def forward(self, x):
            return self.weight * (x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon))

    module = Textbook(96, eps=1e-3).to(DEVICE)
    report = patch_model(module, memory_efficient=True)
    assert "keeps its input for backward: its formula has eps_outside" in report.swapped[0].notes
    assert kept(module, operands(dtype=torch.float32)[0]) == "input"


def test_an_output_of_another_dtype_or_order_of_rows_does_not_serve():
    module = build(dtype=torch.float32)
    patch_model(module, memory_efficient=True)
    assert kept(module, operands(dtype=torch.bfloat16)[0]) == "input"
    packed = rows(2, 5, 3, 96, dtype=torch.float32)
    for x in (packed[:, :, 0], packed.transpose(1, 2), packed[:1, :1].expand(2, 5, 3, 96)):
        check(module, x, rows(*x.shape, dtype=torch.float32, seed=7))


def test_short_rows_keep_their_input():
    module = build(hidden_size=31)
    patch_model(module, memory_efficient=True)
    assert kept(module, operands(31)[0]) == "input"


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


def over_parameters(module, x):
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    return lambda parameters: torch.func.functional_call(module, parameters, (x,)).float().square().sum(), parameters


def of_grad(module, x):
    function, parameters = over_parameters(module, x)
    return torch.func.grad(function)(parameters)


def of_jvp(module, x):
    function, parameters = over_parameters(module, x)
    return {"": torch.func.jvp(function, (parameters,), ({name: p.cos() for name, p in parameters.items()},))[1]}


def of_an_ensemble(module, x):
    function, parameters = over_parameters(module, x)
    many = {name: torch.stack((p, 2 * p)) for name, p in parameters.items()}
    return torch.func.vmap(torch.func.grad(function))(many)


@pytest.mark.parametrize("how", [of_grad, of_jvp, of_an_ensemble])
@pytest.mark.parametrize("name", ["llama", "layer_norm"])
def test_transforms_over_the_parameters_are_those_of_the_default(name, how):
    module, (x, _) = build(name, dtype=torch.float32), operands(dtype=torch.float32)
    found = []
    for memory_efficient in (False, True):
        patch_model(module, memory_efficient=memory_efficient)
        found.append(how(module, x.detach()))
    for name in found[0]:
        assert torch.equal(found[0][name], found[1][name])


def test_batched_gradients():
    module, (x, dy) = build(dtype=torch.float32), operands(dtype=torch.float32)
    patch_model(module, memory_efficient=True)
    inputs = [x, module.weight]
    both = torch.autograd.grad(module(x), inputs, torch.stack((dy, 2 * dy)), is_grads_batched=True)
    for batched, single in zip(both, torch.autograd.grad(module(x), inputs, dy), strict=True):
        torch.testing.assert_close(batched, torch.stack((single, 2 * single)))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_whole_models(family, dtype):
    """By the RMS error of each gradient: the largest one of so many is luck, without `memory_efficient` too."""
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
        ours, theirs = ((grads[name].double() - right).square().mean().sqrt() for grads in (fused, eager))
        assert ours <= FACTOR * theirs, name


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(use_reentrant):
    linear = nn.Linear(96, 96).to(DEVICE, torch.bfloat16)
    module, (x, dy) = nn.Sequential(build(), linear, build()), operands()
    patch_model(module, memory_efficient=True)
    expected = gradients(module, x, dy)

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = module

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=use_reentrant)

    outer = Checkpointed()
    x = x.detach().requires_grad_()
    outer(x).backward(dy)
    for got, right in zip([x.grad, *(p.grad for p in module.parameters())], expected, strict=True):
        assert torch.equal(got, right)


def test_autocast():
    """Half-precision linears around float32 norms: their rounding is the same with the input kept."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        linear = nn.Linear(96, 96).to(DEVICE)
    module = nn.Sequential(build(dtype=torch.float32), linear, build("olmo2", dtype=torch.float32))
    x, dy = operands(dtype=torch.float32)
    patch_model(module)
    with torch.autocast(DEVICE, torch.bfloat16):
        expected = gradients(module, x, dy)
        patch_model(module, memory_efficient=True)
        assert kept(module[0], x) == "output"
        fused = gradients(module, x, dy)
    with use_backend("reference"):
        exact = gradients(copy.deepcopy(module).double(), x.double(), dy.double())
    for i, tensors in enumerate(zip(fused, expected, exact, strict=True)):
        assert_as_accurate(*tensors, f"gradient {i}")


def test_compiled_code_is_as_without():
    module, (x, dy) = build(), operands()
    patch_model(module)
    expected = gradients(torch.compile(module, backend="aot_eager", fullgraph=True), x, dy)
    torch.compiler.reset()
    patch_model(module, memory_efficient=True)
    compiled = gradients(torch.compile(module, backend="aot_eager", fullgraph=True), x, dy)
    assert all(torch.equal(a, b) for a, b in zip(compiled, expected, strict=True))


def test_the_plain_formulas_are_not_concerned():
    module, (x, dy) = build(), operands()
    with use_backend("reference"):
        expected = gradients(module, x, dy)
        patch_model(module, memory_efficient=True)
        assert all(torch.equal(a, b) for a, b in zip(gradients(module, x, dy), expected, strict=True))


def test_the_last_patch_decides_and_unpatching_undoes_all():
    model, (x, _) = nn.ModuleDict({"a": build(), "b": build()}), operands()
    classes = [type(module) for module in model.values()]

    def both():
        return [kept(module, x) for module in model.values()]

    patch_model(model)
    assert both() == ["input"] * 2
    patch_model(model, memory_efficient=True)
    assert both() == ["output"] * 2
    patch_model(model)
    assert both() == ["output"] * 2
    patch_model(model, include="a", memory_efficient=False)
    assert both() == ["input", "output"]
    with patched(model, memory_efficient=True):
        assert both() == ["output"] * 2
    assert both() == ["input", "output"]
    patch_model(model, memory_efficient=False)
    assert both() == ["input"] * 2
    with patched(model, memory_efficient=True):
        unpatch_model(model)
    assert [type(module) for module in model.values()] == classes


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
        return torch.autograd.grad(y, [x, norm.weight], torch.linspace(-1.0, 1.0, y.numel()).view(y.shape))

    expected = [gradients(norm) for norm in norms]
    patch_model(norms, memory_efficient=True)
    for norm, each in zip(norms, expected, strict=True):
        torch.testing.assert_close(gradients(norm), each)
