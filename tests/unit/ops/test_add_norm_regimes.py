"""`fused_add_norm` under compile, export, double backward, checkpointing, functorch, autocast and tensor subclasses."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from hf_rmsnorm import NormSpec, count_launches, use_backend
from hf_rmsnorm.ops import add_norm_backend, fused_add_norm, fused_norm
from hf_rmsnorm.ops.operators import add_norm_forward_op, norm_backward_op, spec_args
from hf_rmsnorm.reference import reference_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ["triton", "reference"]
LLAMA = NormSpec(False, 1e-6, rounding="before_weight")
LAYER_NORM = NormSpec(True, 1e-5, has_bias=True, functional=True)


class Layers(nn.Module):
    """What lies between attention and the next attention: add, norm, mix, add, norm."""

    def __init__(self, hidden_size=64):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.rand(hidden_size, generator=generator) + 0.5)
        self.bias = nn.Parameter(torch.randn(hidden_size, generator=generator))
        self.mix = nn.Parameter(torch.randn(hidden_size, hidden_size, generator=generator) / hidden_size**0.5)

    def forward(self, x, residual):
        h, y = fused_add_norm(x, residual, self.weight, None, LLAMA)
        h, y = fused_add_norm(y @ self.mix, h, self.weight, self.bias, LAYER_NORM)
        return h, y


class EagerLayers(Layers):
    def forward(self, x, residual):
        h = residual + x
        h = h + reference_norm(h, self.weight, None, LLAMA) @ self.mix
        return h, F.layer_norm(h, h.shape[-1:], self.weight, self.bias, 1e-5)


@pytest.fixture
def layers():
    return Layers().to(DEVICE)


def some_input(*shape, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator).to(DEVICE) for _ in range(2)]


def outcome(function, layers, inputs):
    """Both outputs and every gradient of a scalar loss of both."""
    inputs = [t.detach().requires_grad_() for t in inputs]
    layers.zero_grad()
    h, y = function(*inputs)
    (y.square().sum() + h.sin().sum()).backward()
    return [h.detach(), y.detach(), *(t.grad for t in inputs), *(p.grad.clone() for p in layers.parameters())]


def eager_of(layers):
    eager = EagerLayers().to(DEVICE)
    eager.load_state_dict(layers.state_dict())
    return eager


def assert_near(got, expected, tolerance=2e-6):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * b.abs().max().item())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_without_graph_breaks(layers, backend, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(layers, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    with use_backend(backend), count_launches() as launches:
        for rows in (16, 24, 40):
            inputs = some_input(2, rows, 64)
            assert_near(outcome(compiled, layers, inputs), outcome(layers, layers, inputs))
        with torch.no_grad():
            for a, b in zip(compiled(*inputs), layers(*inputs), strict=True):
                assert torch.equal(a, b)
    assert bool(launches) == (backend == "triton")


def test_dynamic_compile_does_not_recompile_for_new_batches(layers):
    torch._dynamo.reset()
    with use_backend("triton"), torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        compiled = torch.compile(layers, fullgraph=True, dynamic=True, backend="aot_eager")
        for rows in (5, 6, 9, 30):
            compiled(*some_input(2, rows, 64))


def test_compile_of_one_output(layers):
    """Dynamo hands the backward zeros for the output that nobody used."""
    torch._dynamo.reset()
    inputs = [t.requires_grad_() for t in some_input(4, 64)]
    for i in (0, 1):
        function = torch.compile(lambda x, r, i=i: layers(x, r)[i].square().sum(), fullgraph=True, backend="aot_eager")
        with use_backend("triton"):
            got = torch.autograd.grad(function(*inputs), inputs)
        assert_near(got, torch.autograd.grad(eager_of(layers)(*inputs)[i].square().sum(), inputs), 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("strict", [True, False])
def test_export(layers, backend, strict):
    batch = torch.export.Dim("batch", min=2, max=64)
    with use_backend(backend), torch.no_grad():
        shapes = ({0: batch}, {0: batch})
        program = torch.export.export(layers, tuple(some_input(2, 8, 64)), strict=strict, dynamic_shapes=shapes)
        names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
        assert names.count("hf_rmsnorm.add_norm_forward.default") == (2 if backend == "triton" else 0)
        for inputs in (some_input(2, 8, 64), some_input(5, 8, 64)):
            for a, b in zip(program.module()(*inputs), layers(*inputs), strict=True):
                assert torch.equal(a, b)


def test_gradients_of_the_reference_to_the_second_order():
    x, residual = (t.double().requires_grad_() for t in some_input(3, 8))
    weight, bias = (t.double().requires_grad_() for t in some_input(8))
    with use_backend("reference"):
        for spec in (LLAMA, LAYER_NORM):
            inputs = (x, residual, weight, bias if spec.has_bias else None)
            function = lambda *t, spec=spec: fused_add_norm(*t, spec)  # noqa: E731
            assert torch.autograd.gradcheck(function, inputs)
            assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("used", [(True, True), (True, False), (False, True)])
def test_double_backward_of_the_kernels(layers, used):
    def second(function):
        inputs = [t.requires_grad_() for t in some_input(4, 64)]
        loss = sum(t.square().sum() for t, wanted in zip(function(*inputs), used, strict=True) if wanted)
        first = torch.autograd.grad(loss, inputs, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), [*inputs, layers.weight])

    eager = EagerLayers().to(DEVICE)
    eager.weight, eager.bias, eager.mix = layers.weight, layers.bias, layers.mix
    with use_backend("triton"):
        got = second(layers)
    assert_near(got, second(eager), 1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(layers, backend, reentrant):
    inputs = some_input(4, 64)
    with use_backend(backend):
        plain = outcome(layers, layers, inputs)
        got = outcome(lambda *t: checkpoint(layers, *t, use_reentrant=reentrant), layers, inputs)
    for a, b in zip(got, plain, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("forward", "backward"), [("triton", "reference"), ("reference", "triton")])
def test_recompute_under_another_backend_says_so(layers, forward, backward):
    inputs = [t.requires_grad_() for t in some_input(4, 64)]
    with use_backend(forward):
        _, y = checkpoint(layers, *inputs, use_reentrant=False)
    with use_backend(backward), pytest.raises(RuntimeError, match=f"under backend '{backward}'.*under '{forward}'"):
        y.sum().backward()


def test_opcheck():
    (x, residual), (weight, bias) = some_input(2, 5, 64), some_input(64)
    llama, layer = spec_args(LLAMA), spec_args(LAYER_NORM)
    plain = spec_args(NormSpec(False, 1e-6, has_weight=False))
    for args in (
        (x, residual, weight, None, *llama, True),
        (x, residual, weight, bias, *layer, False),
        (x.transpose(0, 1), residual.transpose(0, 1), weight, bias, *layer, True),
        (x.transpose(0, 1), residual.view(5, 2, 64), weight, None, *llama, True),
        (x[:1].expand(2, 5, 64), residual, weight, None, *llama, True),
        (x[..., ::2], residual[..., ::2], None, None, *plain, True),
        (x[:0], residual[:0], None, None, *plain, True),
    ):
        torch.library.opcheck(add_norm_forward_op, args)
    rstd, mean, empty = (torch.rand(n, device=DEVICE) for n in (10, 10, 0))
    for args in (
        (x, x, weight, bias, None, residual, rstd, mean, *layer, [True, True, True, False]),
        (x, x, weight, None, None, residual.transpose(0, 1).contiguous().transpose(0, 1), rstd, empty, *llama,
         [True, False, False, False]),
    ):  # fmt: skip
        torch.library.opcheck(norm_backward_op, args)


def test_operators_of_a_graph_serve_what_the_kernels_do_not():
    """A graph exported for float32 may be run in float64."""
    (x, residual), (dh, dy), (weight, _) = ([t.double() for t in some_input(*s)] for s in ((3, 8), (3, 8), (8,)))
    h, y, rstd, mean = add_norm_forward_op(x, residual, weight, None, *spec_args(LLAMA), True)
    leaves = [t.requires_grad_() for t in (x, residual, weight)]
    expected = residual + x, reference_norm(residual + x, weight, None, LLAMA)
    for a, b in zip((h, y), expected, strict=True):
        torch.testing.assert_close(a, b.detach())
    need = [True, True, False, False]
    saved = (h, weight.detach(), None, None, dh, rstd, mean)
    dsum, dweight, *_ = norm_backward_op(dy, *saved, *spec_args(LLAMA), need)
    for a, b in zip((dsum, dsum, dweight), torch.autograd.grad(expected, leaves, [dh, dy]), strict=True):
        torch.testing.assert_close(a, b)


def test_functorch_transforms(layers):
    inputs = some_input(3, 4, 64)
    with use_backend("triton"):
        expected = layers(*inputs)
        assert_near(torch.vmap(layers)(*inputs), expected, 1e-5)
        got = torch.func.grad(lambda *t: sum(v.square().sum() for v in layers(*t)), argnums=(0, 1))(*inputs)
        leaves = [t.clone().requires_grad_() for t in inputs]
        assert_near(got, torch.autograd.grad(sum(v.square().sum() for v in layers(*leaves)), leaves), 1e-4)
        values, tangents = torch.func.jvp(layers, tuple(inputs), tuple(torch.ones_like(t) for t in inputs))
    assert_near(values, expected, 1e-5)
    assert tangents[0].shape == tangents[1].shape == inputs[0].shape


@pytest.mark.parametrize("output", [0, 1])
def test_batched_gradients(output):
    weight = torch.rand(6, device=DEVICE, requires_grad=True)
    inputs = [t.requires_grad_() for t in some_input(2, 6)]
    basis = torch.eye(12, device=DEVICE).view(12, 2, 6)
    with use_backend("triton"):
        h, y = fused_add_norm(*inputs, weight, None, LLAMA)
        out = (h * y, y)[output]
        batched = torch.autograd.grad(out, [*inputs, weight], basis, is_grads_batched=True, retain_graph=True)
        single = [torch.autograd.grad(out, [*inputs, weight], v, retain_graph=True) for v in basis]
    for got, want in zip(batched, zip(*single, strict=True), strict=True):
        torch.testing.assert_close(got, torch.stack(want))


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
def test_make_fx_records_the_operator(layers, tracing_mode):
    from torch.fx.experimental.proxy_tensor import make_fx

    inputs = some_input(4, 64)
    with use_backend("triton"), torch.no_grad():
        graph = make_fx(layers, tracing_mode=tracing_mode, _allow_non_fake_inputs=True)(*inputs)
        for a, b in zip(graph(*inputs), layers(*inputs), strict=True):
            assert torch.equal(a, b)
    assert "hf_rmsnorm.add_norm_forward" in str(graph.code)


def test_jit_trace_sees_plain_operators(layers):
    inputs = some_input(4, 64)
    with use_backend("triton"), torch.no_grad():
        traced = torch.jit.trace(layers, inputs)
    with use_backend("reference"):
        for a, b in zip(traced(*inputs), layers(*inputs), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("spec", [LLAMA, LAYER_NORM])
def test_autocast_gives_the_dtypes_of_eager(spec):
    x, residual = (t.bfloat16() for t in some_input(4, 64))
    weight, bias = some_input(64)
    arguments = (weight.to(x.dtype) if spec.functional else weight, bias.to(x.dtype) if spec.has_bias else None, spec)
    with torch.autocast(DEVICE, torch.bfloat16), use_backend("triton"), torch.no_grad():
        h, y = fused_add_norm(x, residual, *arguments)
        assert torch.equal(h, residual + x)
        assert torch.equal(y, fused_norm(residual + x, *arguments))


def test_an_accelerators_autocast_takes_functional_norms_apart():
    """F.layer_norm returns float32 there, while the stream stays as it is: seen through fake CUDA tensors."""
    enabled = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)
    try:
        with FakeTensorMode(), use_backend("triton"):
            x, weight = (torch.empty(*s, 8, dtype=torch.bfloat16, device="cuda") for s in ((2,), ()))
            assert add_norm_backend(x, x, weight, weight, LAYER_NORM) == "original"
            assert add_norm_backend(x, x, weight, None, LLAMA) == "triton"
            assert add_norm_backend(x.float(), x.float(), weight, weight, LAYER_NORM) == "triton"
            for operand in (x, x.float()):
                h, y = fused_add_norm(operand, operand, weight, weight, LAYER_NORM)
                assert (h.dtype, y.dtype) == (operand.dtype, torch.float32)
    finally:
        torch.set_autocast_enabled("cuda", enabled)


def test_tensor_subclasses_go_through_the_registered_operator():
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

    x, residual = some_input(4, 64)
    weight = torch.ones(64, device=DEVICE)
    with use_backend("triton"):
        got = fused_add_norm(Logged(x), Logged(residual), weight, None, LLAMA)
        assert seen == ["hf_rmsnorm.add_norm_forward.default"]
        for a, b in zip(got, fused_add_norm(x, residual, weight, None, LLAMA), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("which", ["h", "weight"])
def test_what_was_changed_before_the_backward_is_an_error(which):
    x, residual = some_input(4, 64)
    weight = torch.ones(64, device=DEVICE, requires_grad=True)
    with use_backend("triton"):
        h, y = fused_add_norm(x, residual.requires_grad_(), weight, None, LLAMA)
    with torch.no_grad():
        {"h": h, "weight": weight}[which].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_x_and_residual_may_be_changed_before_the_backward():
    """Nothing of them is kept."""
    x, residual = some_input(4, 64)
    weight = torch.ones(64, device=DEVICE, requires_grad=True)
    with use_backend("triton"):
        _, y = fused_add_norm(x, residual, weight, None, LLAMA)
        (expected,) = torch.autograd.grad(y.sum(), weight, retain_graph=True)
        x.zero_(), residual.zero_()
        assert torch.equal(torch.autograd.grad(y.sum(), weight)[0], expected)
