"""Which rotary functions are launched: what one computes at the sizes of a call decides,
and it is watched for changes.
"""

from types import ModuleType

import pytest
import torch
from torch import nn

from benchmarks.counting import Operators
from hf_rmsnorm import count_launches, use_backend
from hf_rmsnorm.fused.attention import rotate_together
from hf_rmsnorm.patching.layers.rotary_code import may_be_rotary

parametrize = pytest.mark.parametrize


def rotate_half(x):
    left, right = x.chunk(2, -1)
    return torch.cat((-right, left), -1)


def turn(x, cos, sin):
    return x * cos + rotate_half(x) * sin


def rotary(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return turn(q, cos, sin), turn(k, cos, sin)


def operands(batch=2, heads=4, k_heads=2, length=6, head_dim=16, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    q, k = (
        random(batch, length, n, head_dim).transpose(1, 2) for n in (heads, k_heads)
    )
    cos, sin = random(2, batch, length, head_dim)
    return q, k, cos, sin


def launched(function, tensors):
    """Whether a launch rotates; its bits are those of the function."""
    with use_backend("triton"), count_launches() as launches:
        results = rotate_together(nn.Module(), function, *tensors)
    for y, expected in zip(results, function(*tensors), strict=True):
        assert y.dtype == expected.dtype
        assert y.stride() == expected.stride()
        assert torch.equal(y, expected)
    return launches == {"rotary_forward": 1}


# Functions that rotate at some sizes, and compute something else at others.


def first_columns(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1)[..., :64], sin.unsqueeze(1)[..., :64]
    of_q = torch.cat((turn(q[..., :64], cos, sin), q[..., 64:]), -1)
    return of_q, torch.cat((turn(k[..., :64], cos, sin), k[..., 64:]), -1)


def more_for_wide_heads(q, k, cos, sin):
    q = q * (1 + q.shape[-1] // 64)
    return rotary(q, k, cos, sin)


def more_for_long_texts(q, k, cos, sin):
    q = q * (1 + q.shape[2] // 16)
    return rotary(q, k, cos, sin)


def first_heads(q, k, cos, sin):
    return rotary(q[:, :8], k, cos, sin)


def without_dimensions_of_one(q, k, cos, sin):
    return rotary(q, k, cos.squeeze(1).unsqueeze(1), sin.squeeze(1).unsqueeze(1))


def of_short_texts_alone(q, k, cos, sin):
    if q.shape[2] > 16:
        return q, k
    return rotary(q, k, cos, sin)


def of_whole_rows(q, k, cos, sin):
    of_q = rotary(q, k, cos, sin)[0].flatten(-2)[..., :512]
    return of_q.unflatten(-1, (-1, q.shape[-1])), rotary(q, k, cos, sin)[1]


CASES = [
    (first_columns, {"head_dim": 64}, {"head_dim": 128}),
    (more_for_wide_heads, {}, {"head_dim": 128}),
    (more_for_long_texts, {}, {"length": 32}),
    (first_heads, {}, {"heads": 12}),
    (of_short_texts_alone, {}, {"length": 17}),
    (of_whole_rows, {}, {"length": 40}),
]


@parametrize("function, small, large", CASES)
def test_a_function_that_changes_with_the_sizes(function, small, large):
    may_be_rotary(function)
    launched(function, operands(**small))
    results = function(*operands(**large))
    expected = rotary(*operands(**large))
    same = [
        y.shape == x.shape and torch.equal(y, x)
        for y, x in zip(results, expected, strict=True)
    ]
    assert not all(same)
    assert not launched(function, operands(**large))


def test_tables_that_only_fit_one_batch_of_heads():
    may_be_rotary(without_dimensions_of_one)
    tensors = operands(batch=4, k_heads=4, length=1)
    assert not launched(without_dimensions_of_one, tensors)


@parametrize("first", [{"length": 1}, {"batch": 1, "length": 3}, {"head_dim": 2}])
def test_the_first_call_may_be_any(first):
    """On the first token cos is one and sin is zero, which every formula fits."""
    assert may_be_rotary(rotary)
    q, k, cos, sin = operands(**first)
    assert launched(rotary, (q, k, torch.ones_like(cos), torch.zeros_like(sin)))
    assert launched(rotary, (q, k, cos, sin))
    assert launched(rotary, operands())


# Functions that may become others.

SCALE = torch.ones(1)
FACTOR = 1.0


def by_a_tensor(q, k, cos, sin, scale=SCALE):
    return rotary(q, k, cos * scale.to(cos.dtype), sin)


def by_a_list(q, k, cos, sin, sizes=[8, 8]):  # noqa: B006
    q1, q2 = q.split(sizes, dim=-1)
    return rotary(torch.cat((q1, q2), dim=-1), k, cos, sin)


def by_name(q, k, cos, sin, *, sign=1):
    return rotary(q, k, cos, sin * sign)


def by_a_global(q, k, cos, sin):
    return rotary(q, k, cos * FACTOR, sin)


def adding_up(q, k, cos, sin):
    """Another dtype under autocast."""
    q = q.unsqueeze(-1).sum(-1)
    return rotary(q, k, cos, sin)


def of_float16(q, k, cos, sin):
    """Other values where q is above its range, or below."""
    return rotary(q.half().to(k.dtype), k, cos, sin)


OTHERS = [by_a_tensor, by_a_list, by_name, by_a_global, adding_up, of_float16]


@parametrize("function", OTHERS)
def test_a_function_that_cannot_be_watched(function):
    assert not may_be_rotary(function)
    assert not launched(function, operands())


of_torch = torch  # by a name that a test may exchange


def turned_by(x, sign=1):
    left, right = x.chunk(2, -1)
    return of_torch.cat((-right * sign, left), -1)


def with_a_helper(q, k, cos, sin, sign=1):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1) * sign
    return q * cos + turned_by(q) * sin, k * cos + turned_by(k) * sin


def other_helper(x, sign=1):
    return -rotate_half(x)


other_torch = ModuleType("torch")
other_torch.cat = torch.cat
NAMES = with_a_helper.__globals__
CHANGES = [
    (setattr, turned_by, "__defaults__", (3,)),
    (setattr, turned_by, "__code__", other_helper.__code__),
    (setattr, with_a_helper, "__defaults__", (-1,)),
    (setattr, with_a_helper, "__code__", with_a_helper.__code__.replace()),
    (dict.__setitem__, NAMES, "turned_by", other_helper),
    (dict.__setitem__, NAMES, "of_torch", other_torch),
]


@parametrize("change, owner, name, value", CHANGES)
def test_a_function_that_changes_later(change, owner, name, value):
    assert may_be_rotary(with_a_helper)
    tensors = operands()
    assert launched(with_a_helper, tensors)
    before = owner[name] if owner is NAMES else getattr(owner, name)
    change(owner, name, value)
    try:
        assert not launched(with_a_helper, tensors)
    finally:
        change(owner, name, before)


def test_nothing_sees_that_the_function_is_run():
    """Its run makes no operators, random numbers or saved tensors of the caller's."""
    assert may_be_rotary(rotary)
    saved = []

    def save(t):
        saved.append(t)
        return t

    counts = []
    for _ in range(2):  # the first call finds out, at a number of columns of its own
        q, *others = operands(head_dim=48)
        q.requires_grad_()
        state = torch.get_rng_state()
        hooks = torch.autograd.graph.saved_tensors_hooks(save, lambda t: t)
        with hooks, Operators() as operators, use_backend("triton"):
            rotate_together(nn.Module(), rotary, q, *others)
        assert torch.equal(torch.get_rng_state(), state)
        counts.append((operators.counts, len(saved)))
        saved.clear()
    assert counts[0] == counts[1]


def test_found_out_in_inference_and_used_in_training():
    assert may_be_rotary(rotary)
    with torch.inference_mode():
        assert launched(rotary, operands(head_dim=32))
    q, k, cos, sin = operands(head_dim=32)
    q.requires_grad_()
    k.requires_grad_()
    assert launched(rotary, (q, k, cos, sin))


def in_float32(q, k, cos, sin):
    dtype = q.dtype
    q, k = rotary(q.float(), k.float(), cos.float(), sin.float())
    return q.to(dtype), k.to(dtype)


def test_a_frozen_k_of_another_dtype():
    """Alone, it would keep that."""
    assert may_be_rotary(in_float32)
    q, k, cos, sin = operands()
    q.requires_grad_()
    assert launched(in_float32, (q.detach(), k, cos, sin))
    assert not launched(in_float32, (q, k.float(), cos, sin))


def test_a_call_that_may_not_start_kernels_leaves_it_to_the_next():
    assert may_be_rotary(rotary)
    q, *others = operands(head_dim=24)

    def mapped(x):
        return rotate_together(nn.Module(), rotary, x[None], *others)[0]

    with use_backend("triton"):
        results = torch.func.vmap(mapped)(q)
    expected = [rotary(x[None], *others)[0] for x in q]
    assert torch.equal(results, torch.stack(expected))
    assert launched(rotary, (q, *others))
