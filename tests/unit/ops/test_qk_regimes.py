"""The fused q/k norm under compile, export, double backward, functorch, tracing modes and checkpointing."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from hf_rmsnorm import NormSpec, count_launches, use_backend
from hf_rmsnorm.ops import fused_qk_norm, qk_norm_backend
from hf_rmsnorm.ops.operators import spec_args
from hf_rmsnorm.ops.qk import qk_norm_backward_op, qk_norm_forward_op
from tests.unit.kernels.test_qk import (
    BF16,
    DEVICE,
    FP32,
    QWEN3,
    angles,
    contiguous,
    gradients,
    packed,
    parameters,
    projected,
)

LAYER_NORM = NormSpec(True, 1e-5, functional=True)


class Heads(nn.Module):
    """What an attention layer does before its attention."""

    def __init__(self, dtype=FP32):
        super().__init__()
        self.q_weight, self.k_weight = map(nn.Parameter, parameters(QWEN3, 16, dtype))

    def forward(self, x, cos, sin):
        q, k = (part.unflatten(-1, (-1, 16)).transpose(1, 2) for part in x.split((64, 32), dim=-1))
        return fused_qk_norm(q, k, self.q_weight, self.k_weight, QWEN3, cos, sin)


def inputs(batch=2, length=5, dtype=FP32):
    x = contiguous(1, batch, length, 96, dtype, 0)[0]
    return x, *angles(batch, length, 16, dtype)


def outcome(function, module, x, *tables):
    x = x.detach().requires_grad_()
    q, k = function(x, *tables)
    loss = (q.float().square() * 1.3).sum() + k.float().sin().sum()
    module.zero_grad()
    loss.backward()
    return [q.detach(), k.detach(), x.grad, *(p.grad for p in module.parameters())]


@pytest.fixture
def heads():
    return Heads().to(DEVICE)


@pytest.mark.full
@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_without_graph_breaks(heads, backend, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(heads, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    with use_backend(backend), count_launches() as launches:
        for batch, length in ((2, 5), (3, 7)):
            given = inputs(batch, length)
            for a, b in zip(outcome(compiled, heads, *given), outcome(heads, heads, *given), strict=True):
                assert a.stride() == b.stride()
                torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)
        with torch.no_grad():
            assert all(map(torch.equal, compiled(*given), heads(*given)))
    assert bool(launches) == (backend == "triton")


@pytest.mark.full
@pytest.mark.parametrize("training", [False, True])
def test_dynamic_compile_does_not_recompile_for_new_batches_and_lengths(heads, training):
    torch._dynamo.reset()
    with use_backend("triton"), torch.set_grad_enabled(training), torch._dynamo.config.patch(error_on_recompile=True):
        compiled = torch.compile(heads, fullgraph=True, dynamic=True, backend="aot_eager")
        for batch, length in ((2, 5), (3, 7), (5, 2)):
            x, *tables = inputs(batch, length)
            q, k = compiled(x.requires_grad_(training), *tables)
            if training:
                (q.sum() + k.sum()).backward()


def test_a_compiled_loss_of_one_output(heads):
    torch._dynamo.reset()
    x, *tables = inputs()

    def loss(x):
        return heads(x, *tables)[0].square().sum()

    grads = []
    with use_backend("triton"):
        for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
            leaf = x.detach().requires_grad_()
            grads.append(torch.autograd.grad(function(leaf), (leaf, heads.q_weight)))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("strict", [True, False])
def test_export(heads, strict):
    given = inputs()
    batch, length = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("length", min=2, max=64)
    shapes = 3 * ({0: batch, 1: length},)
    with use_backend("triton"), torch.no_grad():
        program = torch.export.export(heads, given, strict=strict, dynamic_shapes=shapes)
        names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
        assert "hf_rmsnorm.qk_norm_forward.default" in names
        for other in (given, inputs(3, 9)):
            assert all(map(torch.equal, program.module()(*other), heads(*other)))


@pytest.mark.full
@pytest.mark.parametrize("spec", [QWEN3, LAYER_NORM])
def test_opcheck(spec):
    q, k = packed(2, 4, 5, 16, BF16, 0), projected(2, 2, 5, 16, BF16, 1)
    weights, layer = parameters(spec, 16, BF16), spec_args(spec)
    whole, part = angles(2, 5, 16, BF16), angles(1, 5, 8, BF16)
    for tables in ((None, None), whole, part):
        for stats in (True, False):
            torch.library.opcheck(qk_norm_forward_op, (q, k, *weights, *tables, *layer, stats))
        *_, rstd, mean = qk_norm_forward_op(q, k, *weights, *tables, *layer, True)
        dq, dk = contiguous(2, 4, 5, 16, BF16, 7), packed(2, 2, 5, 16, BF16, 8)
        for grads, need in (((dq, dk), [True] * 4), ((dq, None), [True] * 4), ((dq, dk), [True, False, False, True])):
            args = (*grads, q, k, *weights, *tables, rstd, mean, *layer, need)
            torch.library.opcheck(qk_norm_backward_op, args)


@pytest.mark.parametrize("columns", [None, 6, 4])
@pytest.mark.parametrize("spec", [QWEN3, LAYER_NORM])
def test_gradients_and_their_gradients_in_float64(spec, columns):
    q, k = projected(2, 2, 3, 6, FP32, 0).double(), contiguous(2, 1, 3, 6, FP32, 1).double()
    leaves = [t.requires_grad_() for t in (q, k, *(w.double() for w in parameters(spec, 6, FP32)))]
    tables = () if columns is None else [t.double() for t in angles(2, 3, columns, FP32, shared=False)]
    with use_backend("reference"):
        assert torch.autograd.gradcheck(lambda *t: fused_qk_norm(*t, spec, *tables), leaves)
        assert torch.autograd.gradgradcheck(lambda *t: fused_qk_norm(*t, spec, *tables), leaves)


def test_double_backward_of_a_fused_forward(heads):
    def second(x, *tables):
        leaves = [x.detach().requires_grad_(), *heads.parameters()]
        q, k = heads(leaves[0], *tables)
        first = torch.autograd.grad((q.square().sum() + k.sin().sum()), leaves, create_graph=True)
        one = torch.autograd.grad(heads(leaves[0], *tables)[1].sin().sum(), leaves[::2], create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in (*first, *one)), leaves)

    with use_backend("triton"):
        got = second(*inputs())
    with use_backend("reference"):
        expected = second(*inputs())
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * b.abs().max().item())


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(heads, reentrant):
    given = inputs()
    with use_backend("triton"):
        plain = outcome(heads, heads, *given)
        got = outcome(lambda *z: checkpoint(heads, *z, use_reentrant=reentrant), heads, *given)
    assert all(map(torch.equal, got, plain))


def test_functorch_and_batched_gradients(heads):
    x, *tables = inputs(1, 3)
    x.requires_grad_()

    def loss(z):
        return heads(z, *tables)[0].square().sum()

    with use_backend("triton"):
        torch.testing.assert_close(torch.func.grad(loss)(x), torch.autograd.grad(loss(x), x)[0], rtol=1e-4, atol=1e-4)
        value, tangent = torch.func.jvp(loss, (x,), (torch.ones_like(x),))
        assert value.shape == tangent.shape
        y = heads(x, *tables)[1]
        basis = torch.eye(y.numel(), device=DEVICE).view(-1, *y.shape)
        batched = torch.autograd.grad(y, x, basis, is_grads_batched=True, retain_graph=True)[0]
        single = torch.stack([torch.autograd.grad(y, x, v, retain_graph=True)[0] for v in basis])
    torch.testing.assert_close(batched, single)


def test_make_fx_records_the_operator(heads):
    given = inputs()
    with use_backend("triton"), torch.no_grad():
        graph = make_fx(heads, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*given)
        assert all(map(torch.equal, graph(*given), heads(*given)))
    assert "hf_rmsnorm.qk_norm_forward" in str(graph.code)


def test_fake_tensors_have_the_shapes_dtypes_and_strides_of_real_ones(heads):
    given = inputs()
    with use_backend("triton"):
        real = outcome(heads, heads, *given)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = outcome(heads, heads, *map(mode.from_tensor, given))
    assert [(t.shape, t.dtype, t.stride()) for t in fake] == [(t.shape, t.dtype, t.stride()) for t in real]


def test_an_inplace_change_before_the_backward_is_an_error(heads):
    x, *tables = inputs()
    with use_backend("triton"):
        q, k = heads(x.requires_grad_(), *tables)
    tables[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (q.sum() + k.sum()).backward()


class Tagged(torch.Tensor):
    pass


def test_what_is_not_provably_the_same_is_left_to_the_model():
    q, k = projected(2, 4, 5, 64, BF16, 0), projected(2, 2, 5, 64, BF16, 1)
    w, cos, sin = parameters(QWEN3, 64, BF16)[0], *angles(2, 5, 64, BF16)
    none = NormSpec(False, 1e-6, has_weight=False)

    def backend(*args, spec=QWEN3):
        return qk_norm_backend(*args[:4], spec, *args[4:])

    with use_backend("triton"):
        assert backend(q, k, w, w, cos, sin) == backend(q, k, None, None, spec=none) == "triton"
        refused = [
            (q, k.float(), w, w),
            (q, k, w.float(), w.float()),
            (q, k, w, w, cos.float(), sin.float()),
            (q.as_subclass(Tagged), k, w, w),
            (q, k, None, w),
            (q, k, w[:1], w),
            (q, k, w.repeat(4, 1), w.repeat(2, 1)),
            (q, k[:, :, :3], w, w),
            (q[0], k[0], w, w),
            (q, k, w, w, cos[:, :4], sin[:, :4]),
            (q, k, w, w, cos[..., :63], sin[..., :63]),
            (q, k, w, w, cos.requires_grad_(), sin),
            (q.transpose(2, 3), k.transpose(2, 3), w[:5], w[:5]),
            (projected(1, 1, 1, 520, BF16, 0), projected(1, 1, 1, 520, BF16, 0), *parameters(QWEN3, 520, BF16)),
        ]
        assert {backend(*args) for args in refused} == {"original"}
        for change in ({"gate": "silu_after"}, {"has_bias": True}, {"group_size": 32}):
            assert backend(q, k, w, w, spec=NormSpec(False, 1e-6, **change)) == "original"
        assert backend(q, k, w, w, spec=LAYER_NORM) == "triton"
        with torch.autocast(DEVICE, BF16):
            assert backend(q, k, w, w) == "triton"
            assert backend(q, k, w, w, spec=LAYER_NORM) == "original"
    with use_backend("reference"):
        assert backend(q.double(), k.double(), w.double(), w.double()) == "reference"


def test_what_one_launch_cannot_do_is_computed_in_plain_torch():
    q, k = projected(2, 4, 5, 64, BF16, 0), projected(2, 2, 5, 64, BF16, 1)
    weights = [w.float() for w in parameters(QWEN3, 64, BF16)]
    with use_backend("triton"), count_launches() as launches:
        got = fused_qk_norm(q, k, *weights, QWEN3)
        gradients(lambda *leaves: fused_qk_norm(*leaves, QWEN3), q, k, weights, got[0], got[1])
    assert got[0].dtype == FP32 and not launches
