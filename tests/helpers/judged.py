"""Kernels against float64, judged by what plain torch errs on the same operands."""

import torch
from tolerance import assert_as_accurate

from hf_rmsnorm import use_backend


def doubled(*tensors):
    """The tensors in float64."""
    wide = []
    for t in tensors:
        if t is not None:
            t = t.detach().double()
        wide.append(t)
    return wide


def leaves_of(tensors):
    """Leaves with the values and strides of the tensors, and those that there are."""
    leaves = []
    for t in tensors:
        if t is not None:
            t = t.detach().requires_grad_()
        leaves.append(t)
    present = [t for t in leaves if t is not None]
    return leaves, present


def run(function, operands, dys):
    """The outputs, and the gradients of the operands that there are. An output whose dy
    is None goes nowhere.
    """
    leaves, present = leaves_of(operands)
    outputs = function(*leaves)
    used = []
    of_used = []
    for y, dy in zip(outputs, dys, strict=True):
        if dy is not None:
            used.append(y)
            of_used.append(dy.to(y.dtype))
    gradients = torch.autograd.grad(used, present, of_used)
    return [*(y.detach() for y in outputs), *gradients]


def in_another_order(tensors, shape, seed, last=-2):
    """The tensors, those of a shape with their rows shuffled alike; `last`: the last
    dimension that counts rows.
    """
    moved = []
    for t in tensors:
        if t is not None and t.shape == shape:
            rows = t.detach().flatten(0, last)
            generator = torch.Generator().manual_seed(seed)
            t = rows[torch.randperm(len(rows), generator=generator)]
        moved.append(t)
    return moved


def judge(fused, plain, operands, dys, reorder=in_another_order):
    """(results of the kernels, those of plain torch): the outputs, and the gradients of
    the operands that there are. What is summed over the rows is judged in several orders
    of them: which one adds up best is luck.

    Args:
        fused, plain: functions of the operands, which return as many outputs as there
            are dys.
        operands: x, and others.
    """
    shape = operands[0].shape
    before = [dy if dy is None else dy.clone() for dy in dys]
    with use_backend("triton"):
        ours = run(fused, operands, dys)
    for dy, kept in zip(dys, before, strict=True):
        assert dy is None or torch.equal(dy, kept), "a gradient was overwritten"
    eager = run(plain, operands, dys)
    exact = run(plain, doubled(*operands), doubled(*dys))
    orders = []
    for seed in range(4):
        moved = reorder([*operands, *dys], shape, seed)
        count = len(operands)
        orders.append(run(plain, moved[:count], moved[count:]))
    for i, result in enumerate(ours):
        others = []
        if result.shape != shape:
            others = [results[i] for results in orders]
        assert_as_accurate(result, eager[i], exact[i], f"result {i}", others)
    return ours, eager
