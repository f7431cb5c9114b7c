"""The operators under eager, autograd, compile, export, checkpointing, autocast, functorch and tensor subclasses."""

import shutil

import pytest
import torch
import torch.nn.functional as F
from tolerance import assert_as_accurate
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_rmsnorm import NormSpec, count_launches, layer_norm, rms_norm, use_backend
from hf_rmsnorm.kernels import launch
from hf_rmsnorm.ops import fused_norm
from hf_rmsnorm.ops.operators import norm_backward_op, norm_forward_op, spec_args

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ["triton", "reference"]


class Block(nn.Module):
    """Both norms around a linear, as a decoder layer has them."""

    def __init__(self, hidden_size=64):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.rand(hidden_size, generator=generator) + 0.5)
        self.bias = nn.Parameter(torch.randn(hidden_size, generator=generator))
        self.mix = nn.Parameter(torch.randn(hidden_size, hidden_size, generator=generator) / hidden_size**0.5)

    def forward(self, x):
        return layer_norm(rms_norm(x, self.weight) @ self.mix, self.weight, self.bias)


class EagerBlock(Block):
    def forward(self, x):
        norm = LlamaRMSNorm(x.shape[-1])
        norm.weight = self.weight
        return F.layer_norm(norm(x) @ self.mix, x.shape[-1:], self.weight, self.bias)


@pytest.fixture
def block():
    return Block().to(DEVICE)


def some_input(*shape, seed=3):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def outcome(function, block, x):
    """Output and every gradient of a scalar loss."""
    x = x.detach().requires_grad_()
    block.zero_grad()
    y = function(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in block.parameters())]


def assert_policy(got, block, x):
    eager = EagerBlock()
    eager.load_state_dict(block.state_dict())
    eager.to(x.device)
    expected = outcome(eager, eager, x)
    exact_block = Block().double().to(x.device)
    exact_block.load_state_dict({k: v.double() for k, v in block.state_dict().items()})
    with use_backend("reference"):
        exact = outcome(exact_block, exact_block, x.double())
    for name, a, b, c in zip(("y", "dx", "dweight", "dbias", "dmix"), got, expected, exact, strict=True):
        assert_as_accurate(a, b, c, name)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(16, 64), (2, 8, 64), (2, 2, 4, 64)])
def test_eager(block, backend, shape):
    x = some_input(*shape)
    with use_backend(backend):
        assert_policy(outcome(block, block, x), block, x)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_without_graph_breaks(block, backend, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    with use_backend(backend), count_launches() as launches:
        for rows in (16, 24, 40):
            x = some_input(2, rows, 64)
            got = outcome(compiled, block, x)
            for a, b in zip(got, outcome(block, block, x), strict=True):
                torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6 * b.abs().max().item())
        with torch.no_grad():
            assert torch.equal(compiled(x), block(x))
    assert bool(launches) == (backend == "triton")


def test_dynamic_compile_does_not_recompile_for_new_batches(block):
    torch._dynamo.reset()
    with use_backend("triton"), torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
        for rows in (5, 6, 9, 30):
            compiled(some_input(2, rows, 64))


@pytest.mark.parametrize("backend", BACKENDS)
def test_compile_of_a_norm_in_groups(backend):
    torch._dynamo.reset()
    spec, x, weight = NormSpec(False, 1e-6, group_size=16), some_input(4, 64), some_input(64)
    compiled = torch.compile(lambda t: fused_norm(t, weight, None, spec), fullgraph=True, backend="aot_eager")
    with use_backend(backend):
        assert torch.equal(compiled(x), fused_norm(x, weight, None, spec))


@pytest.mark.full
@pytest.mark.parametrize("backend", BACKENDS)
def test_inductor(block, backend):
    if DEVICE == "cpu" and shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("Inductor needs a C++ compiler for the CPU, and there is none")
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True)
    x = some_input(2, 8, 64)
    with use_backend(backend):
        for a, b in zip(outcome(compiled, block, x), outcome(block, block, x), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * b.abs().max().item())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("strict", [True, False])
def test_export(block, backend, strict):
    x = some_input(2, 8, 64)
    batch = torch.export.Dim("batch", min=2, max=64)
    with use_backend(backend), torch.no_grad():
        program = torch.export.export(block, (x,), strict=strict, dynamic_shapes=({0: batch},))
        names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
        assert ("hf_rmsnorm.norm_forward.default" in names) == (backend == "triton")
        for y in (x, some_input(5, 8, 64)):
            assert torch.equal(program.module()(y), block(y))


@pytest.mark.parametrize("backend", BACKENDS)
def test_double_backward(block, backend):
    x = some_input(4, 64)

    def second(function, x):
        x = x.detach().requires_grad_()
        inputs = [x, block.weight, block.bias]
        first = torch.autograd.grad(function(x).square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), inputs)

    with use_backend(backend):
        got = second(block, x)
    eager = EagerBlock().to(DEVICE)
    eager.weight, eager.bias, eager.mix = block.weight, block.bias, block.mix
    for a, b in zip(got, second(eager, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * b.abs().max().item())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(block, backend, reentrant):
    x = some_input(4, 64)
    with use_backend(backend):
        plain = outcome(block, block, x)
        got = outcome(lambda z: checkpoint(block, z, use_reentrant=reentrant), block, x)
    for a, b in zip(got, plain, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(("forward", "backward"), [("triton", "reference"), ("reference", "triton")])
def test_recompute_under_another_backend_says_so(block, reentrant, forward, backward):
    x = some_input(4, 64).requires_grad_()
    with use_backend(forward):
        y = checkpoint(block, x, use_reentrant=reentrant).sum()
    with use_backend(backward), pytest.raises(RuntimeError, match=f"under backend '{backward}'.*under '{forward}'"):
        y.backward()


def test_recompute_inside_auto_after_an_explicit_forward_says_so(block):
    x = some_input(4, 64).requires_grad_()
    with use_backend("reference"):
        y = checkpoint(block, x, use_reentrant=False).sum()
    with pytest.raises(RuntimeError, match="keep backward\\(\\) inside"):
        y.backward()
    outcome(block, block, x)  # and nothing of it is left behind


def test_backward_uses_the_backend_of_its_forward():
    weight = torch.ones(64, device=DEVICE, requires_grad=True)
    with use_backend("triton"):
        y = rms_norm(some_input(4, 64), weight)
    with use_backend("reference"), count_launches() as launches:
        y.sum().backward()
    assert launches["norm_backward"] == 1


def test_choice_of_backend_is_per_thread_and_nests():
    import threading

    seen = {}

    def other():
        with count_launches() as launches, use_backend("triton"):
            rms_norm(torch.ones(1, 8, device=DEVICE))
        seen["triton"] = launches["norm_forward"]

    with use_backend("triton"), use_backend("reference"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        with count_launches() as launches:
            rms_norm(torch.ones(1, 8, device=DEVICE))
    assert seen == {"triton": 1}
    assert not launches


def test_opcheck():
    x, weight, bias, gate = some_input(2, 5, 64), some_input(64), some_input(64), some_input(2, 5, 64)
    layer = spec_args(NormSpec(True, 1e-6, has_bias=True, functional=True))
    llama = spec_args(NormSpec(False, 1e-6, rounding="before_weight"))
    gemma = spec_args(NormSpec(False, 1e-6, weight_offset=1.0))
    plain = spec_args(NormSpec(False, 1e-6, has_weight=False))
    gated = spec_args(NormSpec(False, 1e-6, rounding="before_weight", gate="silu_before"))
    heads = some_input(5, 64)
    for args in (
        (x, weight, bias, None, *layer, True),
        (x, weight, None, None, *llama, False),
        (x.transpose(0, 1), weight, None, None, *gemma, True),
        (x.bfloat16(), weight, None, None, *llama, True),
        (x[:0], None, None, None, *plain, True),
        (x, weight, None, gate, *gated, True),
        (x, heads, None, None, *llama, True),
    ):
        torch.library.opcheck(norm_forward_op, args)
    rstd, mean, empty = torch.rand(10), torch.rand(10), torch.rand(0)
    other = x.transpose(0, 1).contiguous().transpose(0, 1)
    for args in (
        (x, x, weight, bias, None, None, rstd, mean, *layer, [True, True, True, False]),
        (x, x, weight, None, None, None, rstd, empty, *llama, [True, False, False, False]),
        (x, other, weight, None, None, None, rstd, empty, *llama, [False, True, False, False]),
        (x, x, weight, None, gate.bfloat16(), None, rstd, empty, *gated, [True, True, False, True]),
        (x, x, heads, None, None, None, rstd, empty, *llama, [True, True, False, False]),
    ):
        torch.library.opcheck(norm_backward_op, tuple(a.to(DEVICE) if torch.is_tensor(a) else a for a in args))


@pytest.mark.parametrize("backend", BACKENDS)
def test_functorch_transforms(block, backend):
    x = some_input(3, 4, 64)
    with use_backend(backend):
        torch.testing.assert_close(torch.vmap(block)(x), block(x), rtol=1e-5, atol=1e-5)
        functional = torch.func.grad(lambda z: block(z).square().sum())(x)
        torch.testing.assert_close(functional, outcome(block, block, x)[1], rtol=1e-4, atol=1e-4)
        value, tangent = torch.func.jvp(block, (x,), (torch.ones_like(x),))
        assert value.shape == tangent.shape == x.shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gives_the_dtypes_of_eager(block, dtype):
    x = some_input(4, 64).to(dtype)
    eager = EagerBlock()
    eager.load_state_dict(block.state_dict())
    eager.to(DEVICE)
    with torch.autocast(DEVICE, dtype), use_backend("triton"):
        assert rms_norm(x, block.weight).dtype == LlamaRMSNorm(64).to(DEVICE)(x).dtype == torch.float32
        assert layer_norm(x, block.weight, block.bias).dtype == F.layer_norm(x, (64,), block.weight, block.bias).dtype
        ours, theirs = block(x), eager(x)
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=0.02, atol=0.02)


def test_an_accelerators_autocast_computes_functional_norms_in_float32():
    """Seen through a fake CUDA tensor: F.layer_norm is on autocast's float32 list there, the spelled-out norms not."""
    if DEVICE == "cpu" and not torch.cuda.is_available():
        enabled = torch.is_autocast_enabled("cuda")
        torch.set_autocast_enabled("cuda", True)
    try:
        with FakeTensorMode(), use_backend("triton"):
            x = torch.empty(2, 8, dtype=torch.bfloat16, device="cuda")
            weight = torch.empty(8, device="cuda", dtype=torch.bfloat16)
            assert layer_norm(x, weight).dtype == F.layer_norm(x, (8,), weight).dtype == torch.float32
            assert rms_norm(x, weight).dtype == torch.bfloat16
            functional = NormSpec(False, 1e-6, functional=True)
            assert fused_norm(x, weight, None, functional).dtype == F.rms_norm(x, (8,), weight).dtype == torch.float32
    finally:
        if DEVICE == "cpu":
            torch.set_autocast_enabled("cuda", enabled)


def test_tensor_subclasses_go_through_the_registered_operator(monkeypatch):
    seen = []

    class Logged(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

        def __init__(self, inner):
            self.inner = inner

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            seen.append(str(func))
            args = torch.utils._pytree.tree_map(lambda a: a.inner if isinstance(a, Logged) else a, args)
            return func(*args, **(kwargs or {}))

    x = some_input(4, 64)
    with use_backend("triton"):
        y = rms_norm(Logged(x), torch.ones(64, device=DEVICE))
    assert seen == ["hf_rmsnorm.norm_forward.default"]
    assert torch.equal(y, rms_norm(x, torch.ones(64, device=DEVICE)))

    direct = []
    monkeypatch.setattr(launch, "norm_forward", lambda *a: direct.append(a))
    with FakeTensorMode(allow_non_fake_inputs=True), use_backend("triton"):
        fake = rms_norm(torch.empty(4, 64, device=DEVICE), torch.empty(64, device=DEVICE))
    assert fake.shape == (4, 64) and not direct


def test_selective_checkpointing_and_other_modes_see_consistent_results(block):
    from functools import partial

    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def keep_matmuls(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    x = some_input(4, 64)
    with use_backend("triton"):
        plain = outcome(block, block, x)
        context = partial(create_selective_checkpoint_contexts, keep_matmuls)
        got = outcome(lambda z: checkpoint(block, z, use_reentrant=False, context_fn=context), block, x)
    for a, b in zip(got, plain, strict=True):
        assert torch.equal(a, b)


def test_gradients_accumulate_and_are_never_overwritten():
    """The same dy reaches two branches; an in-place backward would corrupt the second."""
    weight = torch.rand(64, device=DEVICE, requires_grad=True)
    x = some_input(4, 64).requires_grad_()
    with use_backend("triton"):
        y = rms_norm(x, weight)
        z = y + x
        dy = some_input(4, 64, seed=9)
        kept = dy.clone()
        (dx,) = torch.autograd.grad(z, x, dy)
        (alone,) = torch.autograd.grad(rms_norm(x, weight), x, dy)
    assert torch.equal(dy, kept)
    torch.testing.assert_close(dx, alone + kept)


def test_inplace_change_between_forward_and_backward_is_an_error():
    x = some_input(4, 64).requires_grad_()
    weight = torch.ones(64, device=DEVICE, requires_grad=True)
    with use_backend("triton"):
        y = rms_norm(x, weight)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
def test_make_fx_records_the_operator_and_not_the_allocation(block, tracing_mode):
    from torch.fx.experimental.proxy_tensor import make_fx

    x = some_input(4, 64)
    with use_backend("triton"), torch.no_grad():
        graph = make_fx(block, tracing_mode=tracing_mode, _allow_non_fake_inputs=True)(x)
        assert torch.equal(graph(x), block(x))
        assert torch.equal(graph(2 * x), block(2 * x))
    assert "hf_rmsnorm.norm_forward" in str(graph.code)


def test_jit_trace_sees_plain_operators(block):
    x = some_input(4, 64)
    with use_backend("triton"), torch.no_grad():
        traced = torch.jit.trace(block, x)
    with use_backend("reference"):
        assert torch.equal(traced(2 * x), block(2 * x))


def test_batched_gradients_of_a_fused_forward():
    weight = torch.rand(6, device=DEVICE, requires_grad=True)
    x = some_input(2, 6).requires_grad_()
    basis = torch.eye(12, device=DEVICE).view(12, 2, 6)
    with use_backend("triton"):
        y = layer_norm(x, weight, weight)
        batched = torch.autograd.grad(y, (x, weight), basis, is_grads_batched=True, retain_graph=True)
        single = [torch.autograd.grad(y, (x, weight), v, retain_graph=True) for v in basis]
        jacobian = torch.autograd.functional.jacobian(lambda z: layer_norm(z, weight, weight), x, vectorize=True)
    for got, want in zip(batched, zip(*single, strict=True), strict=True):
        torch.testing.assert_close(got, torch.stack(want))
    torch.testing.assert_close(jacobian.view(12, 2, 6), batched[0])


@pytest.mark.parametrize("make", [nn.LayerNorm, nn.RMSNorm, LlamaRMSNorm])
def test_strides_of_the_output_are_those_of_the_module(make):
    module = make(8).to(DEVICE)
    functional = make is not LlamaRMSNorm
    spec = NormSpec(make is nn.LayerNorm, 1e-6, has_bias=make is nn.LayerNorm, functional=functional)
    for x in (some_input(2, 3, 8).transpose(0, 1), some_input(2, 3, 4, 8)[:, 1:], some_input(1, 3, 8).expand(2, 3, 8)):
        with use_backend("triton"):
            y = fused_norm(x, module.weight, getattr(module, "bias", None), spec)
        assert y.stride() == module(x).stride()


@pytest.mark.parametrize("reentrant", [True, False])
def test_other_backends_between_a_checkpoint_and_its_backward_do_not_matter(block, reentrant):
    x = some_input(4, 64)

    def evaluate(backend):
        with use_backend(backend), torch.no_grad():
            block(x)

    plain = outcome(block, block, x)
    block.zero_grad()
    leaf = x.clone().requires_grad_()
    y = checkpoint(block, leaf, use_reentrant=reentrant)
    evaluate("reference")
    y.square().sum().backward()
    assert torch.equal(leaf.grad, plain[1])
    with use_backend("reference"):
        y = checkpoint(block, leaf, use_reentrant=reentrant)
        evaluate("triton")
        leaf.register_hook(lambda g: evaluate("triton"))
        y.sum().backward()


def test_one_use_backend_may_be_entered_twice():
    twice = use_backend("reference")
    with twice, twice:
        pass
    with count_launches() as launches, use_backend("auto"):
        rms_norm(torch.ones(1, 8, device=DEVICE))
    assert launches == {"norm_forward": 1}
