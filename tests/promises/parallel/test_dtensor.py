"""DTensors pass through the registered operators, gradients included: two gloo
processes on the CPU.
"""

import pytest
import torch
from computed import compute_norm
from parallel_runs import run_ranks
from torch.distributed.tensor import (
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from torch.distributed.tensor.debug import CommDebugMode

from hf_rmsnorm import NormSpec, count_launches, layer_norm, rms_norm, use_backend

pytestmark = pytest.mark.full

GATED = NormSpec(centered=False, eps=1e-6, gate="silu_after")
PER_HEAD = NormSpec(centered=True, eps=1e-6, has_bias=True)
GROUPED = NormSpec(centered=False, eps=1e-6, group_size=16)
WHOLE = Replicate()


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def distributed(mesh, tensors, placements):
    pairs = zip(tensors, placements, strict=True)
    return [distribute_tensor(tensor, mesh, [where]) for tensor, where in pairs]


def whole(tensors):
    return [tensor.full_tensor() for tensor in tensors]


def step(function, operands, dy):
    """(output, gradients of the operands)."""
    leaves = [t.detach().requires_grad_() for t in operands]
    y = function(*leaves)
    y.backward(dy)
    return y, [t.grad for t in leaves]


def check(mesh, function, operands, placements, of_gradients):
    """Values are those of whole tensors, outputs and gradients lie where they should,
    and nothing is sent for it.

    Args:
        placements: of the operands. The output is placed as the first one.
        of_gradients: the placements of the operands' gradients.
    """
    rows = placements[0]
    dy = normal(*operands[0].shape, seed=9)
    y, expected = step(function, operands, dy)
    parts = distributed(mesh, operands, placements)
    (dy_part,) = distributed(mesh, [dy], [rows])
    with CommDebugMode() as sent:
        output, gradients = step(function, parts, dy_part)
    assert sent.get_total_counts() == 0, (placements, sent.get_comm_counts())
    assert output.placements == (rows,)
    assert [grad.placements for grad in gradients] == [(p,) for p in of_gradients]
    assert torch.equal(output.full_tensor(), y)
    torch.testing.assert_close(whole(gradients), expected, rtol=1e-5, atol=1e-5)


def norms(mesh):
    weight = normal(64, seed=2)
    bias = normal(64, seed=3)
    # whole, evenly split, and not
    ways = [
        (WHOLE, WHOLE, 4),
        (Shard(0), Partial(), 4),
        (Shard(1), Partial(), 3),
    ]
    for rows, partial, length in ways:
        operands = [normal(2, length, 64), weight, bias]
        placements = [rows, WHOLE, WHOLE]
        gradients = [rows, partial, partial]
        with count_launches() as launches:
            check(mesh, layer_norm, operands, placements, gradients)
        assert launches["norm_forward"] == launches["norm_backward"] == 2


X = normal(4, 6, 64)
WEIGHT = normal(64, seed=2)


def a_split_hidden_size_is_gathered(mesh):
    parts = distributed(mesh, [X, WEIGHT], [Shard(2), WHOLE])
    with CommDebugMode() as sent:
        y = rms_norm(*parts)
    assert sent.get_total_counts() > 0
    assert torch.equal(y.full_tensor(), rms_norm(X, WEIGHT))


def a_gradient_in_another_placement_moves(mesh):
    dy = normal(4, 6, 64, seed=1)
    _, expected = step(rms_norm, [X, WEIGHT], dy)
    placements = Shard(0), WHOLE, Shard(1)
    *parts, dy = distributed(mesh, [X, WEIGHT, dy], placements)
    _, gradients = step(rms_norm, parts, dy)
    torch.testing.assert_close(whole(gradients), expected, rtol=1e-5, atol=1e-5)


def gated(x, weight, gate):
    return compute_norm(x, weight, None, GATED, gate=gate)


def per_head(x, weight, bias):
    return compute_norm(x, weight, bias, PER_HEAD)


def grouped(x, weight):
    return compute_norm(x, weight, None, GROUPED)


def gates_heads_and_groups(mesh):
    rows = Shard(1)
    operands = [X, WEIGHT, normal(4, 6, 64, seed=1)]
    of_gradients = [rows, Partial(), rows]
    check(mesh, gated, operands, [rows, WHOLE, rows], of_gradients)
    operands = [normal(2, 3, 4, 16), normal(4, 16, seed=2), normal(4, 16, seed=3)]
    heads = [Shard(2), Shard(0), Shard(0)]
    check(mesh, per_head, operands, heads, heads)
    # Groups are rows of their own: a hidden size split between them is not gathered.
    groups = [Shard(2), Shard(0)]
    check(mesh, grouped, [X, WEIGHT], groups, groups)


def an_output_lies_as_its_rows(mesh):
    """Compiled, and where each of two dimensions of a mesh splits one of the rows'."""
    compiled = torch.compile(rms_norm, backend="aot_eager", fullgraph=True)
    two = init_device_mesh("cpu", (2, 1))
    ways = (compiled, mesh, (Shard(1),)), (rms_norm, two, (Shard(0), Shard(1)))
    for function, mesh, split in ways:
        rows = distribute_tensor(X, mesh, split)
        y = function(rows, distribute_tensor(WEIGHT, mesh))
        assert y.placements == split
        assert torch.equal(y.full_tensor(), rms_norm(X, WEIGHT))


def work(rank):
    mesh = init_device_mesh("cpu", (2,))
    with use_backend("triton"):
        norms(mesh)
        a_split_hidden_size_is_gathered(mesh)
        a_gradient_in_another_placement_moves(mesh)
        gates_heads_and_groups(mesh)
        an_output_lies_as_its_rows(mesh)


def test_rows_stay_split_and_gradients_of_parameters_are_partial_sums(
    tmp_path, monkeypatch
):
    run_ranks(work, tmp_path, monkeypatch)
