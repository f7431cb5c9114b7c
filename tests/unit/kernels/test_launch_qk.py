"""What the launches of queries and keys take: their plans, their share of the programs, and strides as they come."""

import itertools
from dataclasses import replace

import pytest
import torch

from hf_rmsnorm.formula import NormSpec
from hf_rmsnorm.ops import fused_qk_norm
from hf_rmsnorm.ops.backend import device_refusal
from hf_rmsnorm.reference import reference_qk_norm

pytestmark = pytest.mark.skipif(device_refusal("cpu") is not None, reason="needs TRITON_INTERPRET=1")
if device_refusal("cpu") is None:
    from hf_rmsnorm.kernels import launch_qk, plan_qk
    from hf_rmsnorm.kernels.plan_qk import PROGRAMS_PER_SM, backward_plan, forward_plan, qk_backward_config

LIMITS = 2, 232_448
EVERY = (True,) * 4 + (False,) * 2
RMS = NormSpec(False, 1e-2, rounding="before_weight")


def rows(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "tiles, programs, shares",
    [
        ([3, 5], 8, (3, 5)),
        ([3, 4], 8, (3, 4)),
        ([6, 3], 8, (5, 3)),
        ([8, 1], 8, (7, 1)),
        ([100, 1], 8, (7, 1)),
        ([1, 100], 8, (1, 7)),
        ([32, 8], 8, (6, 2)),
        ([2, 2], 2, (1, 1)),
        ([1, 0], 8, (1, 0)),
        ([100, 0], 8, (8, 0)),
    ],
)
def test_programs_are_shared_in_proportion_and_none_is_left_out(monkeypatch, tiles, programs, shares):
    monkeypatch.setattr(plan_qk, "PROGRAMS_PER_SM", 1)
    q, k = (rows(1, count, 128, 16) for count in tiles)  # a head is a tile
    plan = backward_plan(q, k, q, k, [rows(16)] * 2, None, RMS, EVERY, (programs, 232_448))
    ((q_parts, k_parts, *_),) = plan.sum.values[False]
    assert (q_parts, k_parts) == shares and 16 * sum(shares) == plan.partials and sum(shares) == plan.launch.grid[0]


@pytest.mark.parametrize(
    "head_dim, itemsize, shared, rotary, stages",
    [
        (128, 2, 232_448, False, 3),
        (128, 4, 232_448, True, 2),
        (128, 2, 232_448, True, 3),
        (128, 2, 101_376, True, 2),
        (128, 2, 65_536, True, 1),
        (512, 4, 232_448, True, 2),
        (128, 4, 4 * (1_024 + 2 * 16 * 128 * 4), False, 2),
        (128, 4, 4 * (1_024 + 2 * 16 * 128 * 4) - 4, False, 1),
    ],
)
def test_as_many_stages_as_let_all_programs_fit(head_dim, itemsize, shared, rotary, stages):
    config = qk_backward_config(head_dim, False, itemsize, shared, rotary, [(2_048 // head_dim, 0)] * 2)
    buffer = (5 if rotary else 2) * config.rows * config.block * itemsize
    assert config.stages == stages and config.programs_per_sm == PROGRAMS_PER_SM
    assert stages == 1 or PROGRAMS_PER_SM * ((stages - 1) * buffer + 1_024) <= shared


def planned(need):
    q, k, cos = rows(2, 4, 3, 32), rows(2, 2, 3, 32, seed=1), rows(1, 3, 32, seed=2)
    return backward_plan(q, k, q, k, [rows(32)] * 2, cos, RMS, (*need, False, False), LIMITS)


def test_a_compiled_backward_has_a_code_by_what_it_writes():
    found = {}
    for need in itertools.product((True, False), repeat=4):
        if any(need):
            writes = need[0] or need[1], need[2] or need[3]
            found.setdefault(writes, set()).add(planned(need).launch.codes)
    assert [len(codes) for codes in found.values()] == [1, 1, 1] and len(set.union(*found.values())) == 3


def gradients(function, operands, tables, dys):
    leaves = [t.detach().requires_grad_() for t in operands]
    outputs = function(*leaves, RMS, *tables)
    return *outputs, *torch.autograd.grad(outputs, leaves, dys)


@pytest.mark.parametrize("columns", [20, 21])
@pytest.mark.parametrize("turned", [0, 20, 12])
@pytest.mark.parametrize("gap", [0, 4])
def test_columns_and_strides_that_no_vector_divides(gap, turned, columns):
    def heads(count, seed):
        return rows(2, count, 3, columns + gap, seed=seed)[..., :columns]

    tables = () if not turned else (rows(1, 3, turned, seed=3), rows(1, 3, turned, seed=4))
    operands = heads(4, 0), heads(2, 1), rows(columns) + 2.0, rows(columns, seed=2) + 2.0
    dys = heads(4, 5), heads(2, 6)
    ours, theirs = (gradients(f, operands, tables, dys) for f in (fused_qk_norm, reference_qk_norm))
    for got, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch, length, heads", [(1, 3, 2), (2, 1, 2), (2, 3, 1), (1, 1, 1)])
def test_strides_of_one_of_a_kind_are_anybodys_choice(batch, length, heads):
    """Any number stands for the stride of a dimension of one: it neither is read nor decides on vectors."""
    q, k = (rows(batch, heads, length, 16, seed=seed) for seed in (0, 1))
    tables = rows(1, length, 16, seed=2), rows(1, length, 16, seed=3)

    def odd(t):
        return t.as_strided(
            t.shape, [5 if size == 1 else stride for size, stride in zip(t.shape, t.stride(), strict=True)]
        )

    weights = rows(16) + 2.0, rows(16, seed=4) + 2.0
    plan = forward_plan(odd(q), odd(k), weights, odd(tables[0]), RMS)
    assert plan.launch.vectorised
    dys = odd(rows(batch, heads, length, 16, seed=5)), odd(rows(batch, heads, length, 16, seed=6))
    assert backward_plan(*dys, odd(q), odd(k), weights, odd(tables[0]), RMS, EVERY, LIMITS).launch.vectorised
    ours = gradients(fused_qk_norm, (odd(q), odd(k), *weights), [odd(t) for t in tables], dys)
    theirs = gradients(reference_qk_norm, (q, k, *weights), tables, dys)
    for got, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)


def test_tensors_elsewhere_have_plans_of_their_own():
    operands = rows(2, 4, 3, 16), rows(2, 2, 3, 16), [rows(16)] * 2, rows(1, 3, 16)
    there = [[w.to("meta") for w in t] if isinstance(t, list) else t.to("meta") for t in operands]
    assert forward_plan(*operands, RMS) is forward_plan(*operands, RMS) is not forward_plan(*there, RMS)
    (q, k, *rest), need = operands, EVERY
    here, elsewhere = (backward_plan(each[0], each[1], *each, RMS, need, LIMITS) for each in (operands, there))
    assert here is not elsewhere and here is backward_plan(q, k, q, k, *rest, RMS, need, LIMITS)
    assert here is not backward_plan(q, k, q, k, *rest, RMS, need, (3, 232_448))


def test_what_compiled_code_depends_on_has_a_code_of_its_own():
    """By these codes a compiled kernel is found again: dtypes, absent operands, whether there are statistics."""
    q, k, w, cos = rows(2, 4, 3, 16), rows(2, 2, 3, 16), rows(16), rows(1, 3, 16)
    half = torch.bfloat16
    meta = [t.to("meta") for t in (q, k, w, cos)]
    forwards = [
        (q, k, w, cos), (q, k, w, None), (q.to(half), k.to(half), w, cos), (q, k, w.to(half), cos),
        (q, k, w, cos.to(half)), meta,
    ]  # fmt: skip
    plans = [forward_plan(q, k, [w] * 2, cos, RMS) for q, k, w, cos in forwards]
    plans.append(forward_plan(q, k, [w] * 2, cos, replace(RMS, has_bias=True)))
    found = [code for plan in plans for of_variant in plan.launch.codes for code in of_variant]
    assert len(set(found)) == len(found) == 4 * len(plans)  # aligned or not, statistics or none
    every, biased = EVERY, (True,) * 6
    calls = [
        (q, k, q, k, w, cos, every), (q.to(half), k, q, k, w, cos, every), (q, k.to(half), q, k, w, cos, every),
        (q, k, *meta, every),
        (q, k, q, k, w, cos, (True, True, *[False] * 4)),
        (q, k, q, k, w, cos, (False, False, True, True, False, False)),
        (q, k, q, k, w, cos, biased),
        (q, k, q, k, w.to(half), cos, every), (q, k, q, k, w, cos.to(half), every), (q, k, q, k, w, None, every),
        (q.to(half), k.to(half), q.to(half), k.to(half), w, cos, every),
    ]  # fmt: skip
    plans = [backward_plan(*grads, [w] * 2, cos, RMS, need, LIMITS) for *grads, w, cos, need in calls]
    found = [code for plan in plans for of_variant in plan.launch.codes for code in of_variant]
    assert len(set(found)) == len(found) == 2 * len(calls)
    sums = {
        backward_plan(q, k, q, k, [w] * 2, cos, RMS, (True, True, *of, False, False), LIMITS).sum.codes
        for of in ((True, True), (True, False), (False, True))
    }
    assert len(sums) == 3


@pytest.mark.parametrize("batch, length", [(0, 3), (2, 0)])
def test_no_rows(batch, length):
    q, k, parameters = rows(batch, 4, length, 16), rows(batch, 2, length, 16), [rows(16) for _ in range(4)]
    spec = replace(RMS, has_bias=True)
    yq, yk, rstd, mean = launch_qk.qk_norm_forward(q, k, parameters, None, None, spec, True)
    assert yq.shape == q.shape and yk.shape == k.shape and rstd.numel() == 0 and mean is None
    found = launch_qk.qk_norm_backward(yq, yk, q, k, parameters, None, None, rstd, mean, spec, (True,) * 6)
    assert [t.shape for t in found] == [t.shape for t in (q, k, *parameters)] and not any(t.any() for t in found)
