"""Norms, alone, behind a sum and of queries and keys, in autograd and wherever torch
needs operators that it can see: double backward, checkpoints, functorch, autocast,
subclasses.
"""

import copy
from functools import partial

import pytest
import torch
from tolerance import assert_as_accurate
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import (
    CheckpointError,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from hf_rmsnorm import count_launches, use_backend
from tests.unit.ops.modules import (
    BACKENDS,
    DEVICE,
    MODULES,
    Norms,
    assert_equal,
    assert_near,
    leaves_of,
    loss,
    outcome,
)

# Gradients


@pytest.mark.parametrize("backend", BACKENDS)
def test_eager(module, backend):
    inputs = module.inputs()
    with use_backend(backend):
        results = outcome(module, module, inputs)
    expected = outcome(module.eager, module, inputs)
    exact_module = copy.deepcopy(module).double()
    exact_inputs = [t.double() for t in inputs]
    exact = outcome(exact_module.eager, exact_module, exact_inputs)
    for tensors in zip(results, expected, exact, strict=True):
        assert_as_accurate(*tensors)


def test_gradients_of_the_reference_to_the_second_order(module):
    module = type(module)(6).double()
    inputs = module.inputs(2, 1)
    inputs = [t.double() for t in inputs]
    leaves, rest = leaves_of(module, inputs)
    parameters = dict(module.named_parameters())

    def function(*leaves):
        operands = leaves[: module.operands]
        values = leaves[module.operands :]
        replaced = dict(zip(parameters, values, strict=True))
        inputs = *operands, *rest
        return torch.func.functional_call(module, replaced, inputs)

    for parameter in parameters.values():
        leaves.append(parameter.detach().requires_grad_())
    with use_backend("reference"):
        assert torch.autograd.gradcheck(function, leaves)
        assert torch.autograd.gradgradcheck(function, leaves)


USED = [("norm", [0])]
for pair in ("add_norm", "qk_norm"):
    for used in ([0, 1], [0], [1]):
        USED.append((pair, used))


@pytest.mark.parametrize("name, used", USED)
def test_double_backward_of_the_kernels(name, used):
    module = MODULES[name]()
    inputs = module.inputs(2, 4)
    leaves, rest = leaves_of(module, inputs)
    weights = [*leaves, *module.parameters()]

    def second(function):
        outputs = function(*leaves, *rest)
        seen = [outputs[i] for i in used]
        lost = loss(seen)
        first = torch.autograd.grad(
            lost, weights, create_graph=True, materialize_grads=True
        )
        penalty = 0.0
        for gradient in first:
            penalty = penalty + gradient.square().sum()
        return torch.autograd.grad(penalty, weights, materialize_grads=True)

    with use_backend("triton"):
        got = second(module)
    assert_near(got, second(module.eager), 1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(module, backend, reentrant):
    inputs = module.inputs(1, 4)
    again = partial(checkpoint, module, use_reentrant=reentrant)
    with use_backend(backend):
        plain = outcome(module, module, inputs)
        assert_equal(outcome(again, module, inputs), plain)


def test_selective_checkpointing(module):
    def keep_matmuls(ctx, op, *args, **kwargs):
        if op is torch.ops.aten.mm.default:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    inputs = module.inputs(1, 4)
    context = partial(create_selective_checkpoint_contexts, keep_matmuls)
    again = partial(checkpoint, module, use_reentrant=False, context_fn=context)
    with use_backend("triton"):
        plain = outcome(module, module, inputs)
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
        leaves, rest = leaves_of(module, inputs)
        module.zero_grad()
        with use_backend(forward):
            outputs = checkpoint(module, *leaves, *rest, use_reentrant=reentrant)
        with use_backend(backward):
            loss(outputs).backward()
        weights = [*leaves, *module.parameters()]
        return [t.grad for t in weights]

    with pytest.raises(CheckpointError):
        recomputed(reentrant=False)
    gradients = recomputed(reentrant=True)
    count = len(gradients)
    assert_near(gradients, expected[-count:], 1e-4)
    # nothing of it is left behind
    assert_equal(outcome(module, module, inputs), expected)


def assert_change_is_noticed(outputs, changed):
    with torch.no_grad():
        changed.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss(outputs).backward()


def test_a_weight_that_was_changed_before_the_backward_is_an_error(module):
    inputs = module.inputs(1, 4)
    leaves, rest = leaves_of(module, inputs)
    with use_backend("triton"):
        outputs = module(*leaves, *rest)
    assert_change_is_noticed(outputs, next(module.parameters()))


@pytest.mark.parametrize("name", ["add_norm", "qk_norm"])
def test_a_sum_or_table_that_was_changed_before_the_backward_is_an_error(name):
    module = MODULES[name]()
    inputs = module.inputs(1, 4)
    leaves, rest = leaves_of(module, inputs)
    with use_backend("triton"):
        outputs = module(*leaves, *rest)
    changed = outputs[0]
    if rest:
        changed = rest[0]
    assert_change_is_noticed(outputs[-1:], changed)


@pytest.mark.full
def test_batched_gradients(module):
    module = type(module)(8)
    inputs = module.inputs(1, 2)
    operands, rest = leaves_of(module, inputs)
    leaves = [*operands, next(module.parameters())]

    def product(*operands):
        """Of both outputs where there are two, so that the gradient of each matters."""
        outputs = module(*operands, *rest)
        first = outputs[0].flatten()
        last = outputs[-1].flatten()
        return first[:16] * last[:16]

    with use_backend("triton"):
        y = product(*operands)
        basis = torch.eye(y.numel(), device=DEVICE)
        batched = torch.autograd.grad(
            y, leaves, basis, is_grads_batched=True, retain_graph=True
        )
        for i, v in enumerate(basis):
            single = torch.autograd.grad(y, leaves, v, retain_graph=True)
            rows = tuple(gradients[i] for gradients in batched)
            torch.testing.assert_close(rows, single)
        jacobian = torch.autograd.functional.jacobian(
            product, tuple(operands), vectorize=True
        )
    assert_near(jacobian, batched[: module.operands])


@pytest.mark.parametrize("backend", BACKENDS)
def test_functorch_transforms(module, backend):
    inputs = module.inputs(3, 4)
    leaves, rest = leaves_of(module, inputs)
    operands = inputs[: module.operands]
    ones = tuple(map(torch.ones_like, operands))

    def function(*operands):
        return module(*operands, *rest)

    def lost(*operands):
        return loss(function(*operands))

    with use_backend(backend):
        expected = module(*inputs)
        if not rest:  # a rotary embedding has no batch to map over
            mapped = torch.vmap(module)
            assert_near(mapped(*inputs), expected, 1e-5)
        which = tuple(range(module.operands))
        differentiate = torch.func.grad(lost, argnums=which)
        got = differentiate(*operands)
        gradients = torch.autograd.grad(lost(*leaves), leaves)
        assert_near(got, gradients, 1e-4)
        values, tangents = torch.func.jvp(function, operands, ones)
    assert_near(values, expected, 1e-5)
    for value, tangent in zip(values, tangents, strict=True):
        assert tangent.shape == value.shape


# Other tensors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gives_the_dtypes_of_eager(module, dtype):
    inputs = module.inputs(1, 4)
    inputs = [t.to(dtype) for t in inputs]
    with torch.autocast(DEVICE, dtype), use_backend("triton"):
        ours = module(*inputs)
        theirs = module.eager(*inputs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)


def unwrapped(logged):
    return logged.inner


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
        args = tree_map_only(Logged, unwrapped, args)
        return func(*args, **(kwargs or {}))


def test_tensor_subclasses_go_through_the_registered_operator(monkeypatch):
    module = Norms()
    monkeypatch.setattr(Logged, "seen", [])
    (x,) = module.inputs(1, 4)
    with use_backend("triton"), torch.no_grad():
        got = module(Logged(x))
        assert Logged.seen[0] == "hf_rmsnorm.norm_forward.default"
        assert_equal(got, module(x))


def test_fake_tensors_have_the_shapes_dtypes_and_strides_of_real_ones(module):
    inputs = module.inputs()
    with use_backend("triton"):
        real = outcome(module, module, inputs)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = [mode.from_tensor(t) for t in inputs]
            with count_launches() as launches:
                made = outcome(module, module, fakes)
    assert not launches
    for a, b in zip(made, real, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        assert a.stride() == b.stride()
