"""Norms, alone, behind a sum and of queries and keys, wherever torch needs operators
that it can see, and in autograd.

Compilers, export, tracing, double backward, checkpoints, functorch, autocast,
subclasses. Each is called by a small module that also says, in `eager`, what plain
torch computes in its place.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from add_norm import fused_add_norm
from heads import fused_qk_norm
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import (
    CheckpointError,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from hf_rmsnorm import NormSpec, count_launches, layer_norm, rms_norm, use_backend
from hf_rmsnorm.reference import reference_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ["triton", "reference"]
LLAMA = NormSpec(False, 1e-6, rounding="before_weight")
LAYER_NORM = NormSpec(True, 1e-5, has_bias=True, functional=True)


def random(*shape, seed=3):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    return values.to(DEVICE)


class Norms(nn.Module):
    """Both norms around a linear, as a decoder layer has them."""

    calls, operands = 2, 1

    def __init__(self, size=64):
        super().__init__()
        self.size = size
        self.weight = nn.Parameter(0.5 + random(size, seed=0).sigmoid())
        self.bias = nn.Parameter(random(size, seed=1))
        self.mix = nn.Parameter(random(size, size, seed=2) / size**0.5)

    def inputs(self, batch=2, length=8):
        return (random(batch, length, self.size),)

    def forward(self, x):
        return (
            layer_norm(rms_norm(x, self.weight) @ self.mix, self.weight, self.bias),
        )

    def eager(self, x):
        y = reference_norm(x, self.weight, None, NormSpec(False, 1e-6))
        return (F.layer_norm(y @ self.mix, x.shape[-1:], self.weight, self.bias),)


class Sums(Norms):
    """What lies between attention and the next attention: add, norm, mix, add, norm."""

    operands = 2

    def inputs(self, batch=2, length=8):
        return tuple(random(batch, length, self.size, seed=seed) for seed in (3, 4))

    def forward(self, x, residual):
        h, y = fused_add_norm(x, residual, self.weight, None, LLAMA)
        return fused_add_norm(y @ self.mix, h, self.weight, self.bias, LAYER_NORM)

    def eager(self, x, residual):
        h = residual + x
        h = h + reference_norm(h, self.weight, None, LLAMA) @ self.mix
        return h, F.layer_norm(h, h.shape[-1:], self.weight, self.bias, 1e-5)


class Heads(nn.Module):
    """What an attention layer does before its attention: four heads of q, two of k, and
    a rotary embedding.
    """

    calls, operands = 2, 1

    def __init__(self, size=16):
        super().__init__()
        self.size = size
        self.q_weight, self.k_weight = (
            nn.Parameter(0.5 + random(size, seed=seed).sigmoid()) for seed in (0, 1)
        )

    def inputs(self, batch=2, length=8):
        angles = random(batch, length, self.size // 2, seed=5)
        angles = angles.repeat(1, 1, 2)
        return random(batch, length, 6 * self.size), angles.cos(), angles.sin()

    def split(self, x):
        parts = x.split((4 * self.size, 2 * self.size), dim=-1)
        heads = [part.unflatten(-1, (-1, self.size)) for part in parts]
        return [part.transpose(1, 2) for part in heads]

    def forward(self, x, cos, sin):
        return fused_qk_norm(
            *self.split(x), self.q_weight, self.k_weight, LLAMA, cos, sin
        )

    def eager(self, x, cos, sin):
        def turned(t, weight):
            t = reference_norm(t, weight, None, LLAMA)
            left, right = t.chunk(2, dim=-1)
            other = torch.cat((-right, left), dim=-1)
            return t * cos[:, None] + other * sin[:, None]

        q, k = self.split(x)
        return turned(q, self.q_weight), turned(k, self.k_weight)


MODULES = {"norm": Norms, "add_norm": Sums, "qk_norm": Heads}


@pytest.fixture(params=MODULES)
def module(request):
    return MODULES[request.param]()


def loss(outputs):
    first, *others = outputs
    total = first.float().square().sum()
    for y in others:
        total = total + y.float().sin().sum()
    return total


def leaves_of(module, inputs):
    return [t.detach().requires_grad_() for t in inputs[: module.operands]]


def outcome(function, module, inputs):
    """Every output, and every gradient of a loss of them all."""
    leaves = leaves_of(module, inputs)
    module.zero_grad()
    outputs = function(*leaves, *inputs[module.operands :])
    loss(outputs).backward()
    return [
        *(y.detach() for y in outputs),
        *(t.grad for t in leaves),
        *(p.grad.clone() for p in module.parameters()),
    ]


def assert_near(got, expected, tolerance=2e-6):
    for a, b in zip(got, expected, strict=True):
        atol = tolerance * b.abs().max().item()
        torch.testing.assert_close(a, b, rtol=tolerance, atol=atol)


def assert_equal(got, expected):
    assert len(got) == len(expected)
    assert all(map(torch.equal, got, expected))


# Compilers


static_kernels = pytest.param("triton", False)
COMPILED = [
    static_kernels,
    *(
        pytest.param(*case, marks=pytest.mark.full)
        for case in (("triton", True), ("reference", False), ("reference", True))
    ),
]


@pytest.mark.full
@pytest.mark.parametrize("backend, dynamic", COMPILED)
def test_compile_without_graph_breaks(module, backend, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(
        module, fullgraph=True, dynamic=dynamic, backend="aot_eager"
    )
    with use_backend(backend), count_launches() as launches:
        for batch, length in ((2, 5), (3, 7)):
            inputs = module.inputs(batch, length)
            got = outcome(compiled, module, inputs)
            expected = outcome(module, module, inputs)
            assert_near(got, expected)
            assert [t.stride() for t in got] == [t.stride() for t in expected]
        with torch.no_grad():
            assert_equal(compiled(*inputs), module(*inputs))
    assert bool(launches) == (backend == "triton")


@pytest.mark.parametrize(
    "training", [False, pytest.param(True, marks=pytest.mark.full)]
)
def test_dynamic_compile_does_not_recompile_for_new_batches_and_lengths(
    module, training
):
    torch._dynamo.reset()
    with (
        use_backend("triton"),
        torch.set_grad_enabled(training),
        torch._dynamo.config.patch(error_on_recompile=True),
    ):
        compiled = torch.compile(
            module, fullgraph=True, dynamic=True, backend="aot_eager"
        )
        for batch, length in ((2, 5), (3, 7), (5, 2)):
            inputs = module.inputs(batch, length)
            operands = inputs[: module.operands]
            if training:
                operands = leaves_of(module, inputs)
            outputs = compiled(*operands, *inputs[module.operands :])
            if training:
                loss(outputs).backward()


@pytest.mark.parametrize(
    "name, used", [("add_norm", 0), ("add_norm", 1), ("qk_norm", 0), ("qk_norm", 1)]
)
def test_a_compiled_loss_of_one_output(name, used):
    """Dynamo hands the backward zeros for the output that nobody used."""
    torch._dynamo.reset()
    module = MODULES[name]()
    inputs = module.inputs()
    leaves = leaves_of(module, inputs)

    def one(function, *leaves):
        return function(*leaves, *inputs[module.operands :])[used].square().sum()

    with use_backend("triton"):
        compiled = torch.compile(
            partial(one, module), fullgraph=True, backend="aot_eager"
        )
        got = torch.autograd.grad(compiled(*leaves), leaves)
    expected = torch.autograd.grad(one(module.eager, *leaves), leaves)
    assert_near(got, expected, 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("strict", [True, False])
def test_export(module, backend, strict):
    inputs = module.inputs()
    sizes = {
        0: torch.export.Dim("batch", min=2, max=64),
        1: torch.export.Dim("length", min=2, max=64),
    }
    with use_backend(backend), torch.no_grad():
        program = torch.export.export(
            module, inputs, strict=strict, dynamic_shapes=(sizes,) * len(inputs)
        )
        names = []
        for node in program.graph.nodes:
            if node.op == "call_function":
                names.append(str(node.target))
        fused = names.count("hf_rmsnorm.norm_forward.default")
        assert fused == (module.calls if backend == "triton" else 0)
        for given in (inputs, module.inputs(5, 3)):
            assert_equal(program.module()(*given), module(*given))


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
def test_make_fx_records_the_operator_and_not_the_allocation(module, tracing_mode):
    inputs = module.inputs(1, 4)
    with use_backend("triton"), torch.no_grad():
        graph = make_fx(module, tracing_mode=tracing_mode, _allow_non_fake_inputs=True)(
            *inputs
        )
        for given in (inputs, (2 * inputs[0], *inputs[1:])):
            assert_equal(graph(*given), module(*given))
    assert "hf_rmsnorm.norm_forward" in str(graph.code)


@pytest.mark.filterwarnings("ignore")
def test_jit_trace_sees_plain_operators(module):
    inputs = module.inputs(1, 4)
    with use_backend("triton"), torch.no_grad():
        traced = torch.jit.trace(module, inputs)
    given = 2 * inputs[0], *inputs[1:]
    with use_backend("reference"):
        assert_equal(traced(*given), module(*given))


# Gradients


def test_gradients_of_the_reference_to_the_second_order(module):
    module = type(module)(6).double()
    inputs = [t.double() for t in module.inputs(2, 1)]
    names, values = zip(*module.named_parameters(), strict=True)

    def function(*leaves):
        operands = leaves[: module.operands]
        parameters = dict(zip(names, leaves[module.operands :], strict=True))
        return torch.func.functional_call(
            module, parameters, (*operands, *inputs[module.operands :])
        )

    leaves = [
        *leaves_of(module, inputs),
        *(p.detach().requires_grad_() for p in values),
    ]
    with use_backend("reference"):
        assert torch.autograd.gradcheck(function, leaves)
        assert torch.autograd.gradgradcheck(function, leaves)


USED = [
    ("norm", (0,)),
    *(
        (name, used)
        for name in ("add_norm", "qk_norm")
        for used in ((0, 1), (0,), (1,))
    ),
]


@pytest.mark.parametrize("name, used", USED)
def test_double_backward_of_the_kernels(name, used):
    module = MODULES[name]()
    inputs = module.inputs(2, 4)
    leaves = leaves_of(module, inputs)

    def second(function):
        outputs = function(*leaves, *inputs[module.operands :])
        weights = [*leaves, *module.parameters()]
        lost = loss([outputs[i] for i in used])
        first = torch.autograd.grad(
            lost, weights, create_graph=True, materialize_grads=True
        )
        penalty = sum(g.square().sum() for g in first)
        return torch.autograd.grad(penalty, weights, materialize_grads=True)

    with use_backend("triton"):
        got = second(module)
    assert_near(got, second(module.eager), 1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(module, backend, reentrant):
    inputs = module.inputs(1, 4)
    with use_backend(backend):
        plain = outcome(module, module, inputs)
        again = partial(checkpoint, module, use_reentrant=reentrant)
        assert_equal(outcome(again, module, inputs), plain)


def test_selective_checkpointing(module):
    def keep_matmuls(ctx, op, *args, **kwargs):
        if op is torch.ops.aten.mm.default:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    inputs = module.inputs(1, 4)
    context = partial(create_selective_checkpoint_contexts, keep_matmuls)
    with use_backend("triton"):
        plain = outcome(module, module, inputs)
        again = partial(checkpoint, module, use_reentrant=False, context_fn=context)
        assert_equal(outcome(again, module, inputs), plain)


@pytest.mark.parametrize(
    ("forward", "backward"), [("triton", "reference"), ("reference", "auto")]
)
def test_torch_notices_a_recompute_under_another_backend(module, forward, backward):
    """As `use_backend` says; where torch does not look (reentrant), the gradients are
    those of the recompute.
    """
    inputs = module.inputs(1, 4)
    expected = outcome(module, module, inputs)

    def recomputed(reentrant):
        leaves = leaves_of(module, inputs)
        module.zero_grad()
        with use_backend(forward):
            outputs = checkpoint(
                module, *leaves, *inputs[module.operands :], use_reentrant=reentrant
            )
        with use_backend(backward):
            loss(outputs).backward()
        return [*(t.grad for t in leaves), *(p.grad for p in module.parameters())]

    with pytest.raises(CheckpointError):
        recomputed(reentrant=False)
    assert_near(
        recomputed(reentrant=True), expected[2 - (type(module) is Norms) :], 1e-4
    )
    # nothing of it is left behind
    assert_equal(outcome(module, module, inputs), expected)


CHANGED = [
    ("norm", "weight"),
    ("add_norm", "weight"),
    ("add_norm", "sum"),
    ("qk_norm", "weight"),
    ("qk_norm", "cos"),
]


@pytest.mark.parametrize("name, which", CHANGED)
def test_what_was_changed_before_the_backward_is_an_error(name, which):
    module = MODULES[name]()
    inputs = module.inputs(1, 4)
    with use_backend("triton"):
        outputs = module(*leaves_of(module, inputs), *inputs[module.operands :])
    changed = {
        "weight": next(module.parameters()),
        "sum": outputs[0],
        "cos": inputs[1 % len(inputs)],
    }
    with torch.no_grad():
        changed[which].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss(outputs[-1:] if which == "sum" else outputs).backward()


@pytest.mark.full
def test_batched_gradients(module):
    module = type(module)(8)
    inputs = module.inputs(1, 2)
    leaves = [*leaves_of(module, inputs), next(module.parameters())]

    def product(*operands):
        """Of both outputs where there are two, so that the gradient of each matters."""
        outputs = []
        for y in module(*operands, *inputs[module.operands :]):
            outputs.append(y.flatten()[:16])
        return outputs[0] * outputs[-1]

    with use_backend("triton"):
        y = product(*leaves[: module.operands])
        basis = torch.eye(y.numel(), device=DEVICE)
        batched = torch.autograd.grad(
            y, leaves, basis, is_grads_batched=True, retain_graph=True
        )
        single = [torch.autograd.grad(y, leaves, v, retain_graph=True) for v in basis]
        jacobian = torch.autograd.functional.jacobian(
            product, tuple(leaves[: module.operands]), vectorize=True
        )
    for got, want in zip(batched, zip(*single, strict=True), strict=True):
        torch.testing.assert_close(got, torch.stack(want))
    assert_near(jacobian, batched[: module.operands])


@pytest.mark.parametrize("backend", BACKENDS)
def test_functorch_transforms(module, backend):
    inputs = module.inputs(3, 4)
    operands = inputs[: module.operands]
    rest = inputs[module.operands :]
    with use_backend(backend):
        expected = module(*inputs)
        if not rest:  # a rotary embedding has no batch to map over
            assert_near(torch.vmap(module)(*inputs), expected, 1e-5)
        which = tuple(range(module.operands))
        got = torch.func.grad(lambda *t: loss(module(*t, *rest)), argnums=which)(
            *operands
        )
        leaves = leaves_of(module, inputs)
        lost = loss(module(*leaves, *rest))
        assert_near(got, torch.autograd.grad(lost, leaves), 1e-4)
        ones = tuple(map(torch.ones_like, operands))
        values, tangents = torch.func.jvp(lambda *t: module(*t, *rest), operands, ones)
    assert_near(values, expected, 1e-5)
    assert [t.shape for t in tangents] == [t.shape for t in values]


# Other tensors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gives_the_dtypes_of_eager(module, dtype):
    inputs = [t.to(dtype) for t in module.inputs(1, 4)]
    with torch.autocast(DEVICE, dtype), use_backend("triton"):
        ours = module(*inputs)
        theirs = module.eager(*inputs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a.float(), b.float(), rtol=0.02, atol=0.02)


class Logged(torch.Tensor):
    """A wrapper that writes down what is called on it."""

    seen = []

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(str(func))
        args = torch.utils._pytree.tree_map(
            lambda a: a.inner if isinstance(a, Logged) else a, args
        )
        return func(*args, **(kwargs or {}))


def test_tensor_subclasses_go_through_the_registered_operator(monkeypatch):
    module = Norms()
    seen = []
    monkeypatch.setattr(Logged, "seen", seen)
    inputs = module.inputs(1, 4)
    with use_backend("triton"), torch.no_grad():
        got = module(*map(Logged, inputs))
        assert seen[0] == "hf_rmsnorm.norm_forward.default"
        assert_equal(got, module(*inputs))


def test_fake_tensors_have_the_shapes_dtypes_and_strides_of_real_ones(module):
    inputs = module.inputs()
    with use_backend("triton"):
        real = outcome(module, module, inputs)
        with (
            FakeTensorMode(allow_non_fake_inputs=True) as mode,
            count_launches() as launches,
        ):
            fake = outcome(module, module, list(map(mode.from_tensor, inputs)))
    assert not launches
    assert [(t.shape, t.dtype, t.stride()) for t in fake] == [
        (t.shape, t.dtype, t.stride()) for t in real
    ]
