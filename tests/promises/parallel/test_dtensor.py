"""DTensors pass through the registered operators, gradients included: two gloo
processes on the CPU.
"""

import pytest
import torch
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
from hf_rmsnorm.ops import fused_norm

pytestmark = pytest.mark.full

LLAMA = NormSpec(centered=False, eps=1e-6)
GATED = NormSpec(centered=False, eps=1e-6, gate="silu_after")
PER_HEAD = NormSpec(centered=True, eps=1e-6, has_bias=True)
GROUPED = NormSpec(centered=False, eps=1e-6, group_size=16)
WHOLE = Replicate()


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def distributed(mesh, tensors, placements):
    return [
        distribute_tensor(t, mesh, [p])
        for t, p in zip(tensors, placements, strict=True)
    ]


def whole(tensors):
    return [tensor.full_tensor() for tensor in tensors]


def as_tuple(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)


def step(function, operands, dys):
    """(outputs, gradients of the operands)."""
    leaves = [t.detach().requires_grad_() for t in operands]
    outputs = as_tuple(function(*leaves))
    torch.autograd.backward(outputs, dys)
    return outputs, [t.grad for t in leaves]


def check(mesh, function, operands, placements, of_outputs, of_gradients):
    """Values are those of whole tensors, they lie where they should, and nothing is
    sent for it.

    Args:
        placements: of the operands.
        of_outputs: the placements of the outputs; their gradients come in the same.
        of_gradients: the placements of the operands' gradients.
    """
    dys = [normal(*y.shape, seed=9) for y in as_tuple(function(*operands))]
    expected = step(function, operands, dys)
    parts = distributed(mesh, operands, placements)
    dy_parts = distributed(mesh, dys, of_outputs)
    with CommDebugMode() as sent:
        outputs, gradients = step(function, parts, dy_parts)
    assert sent.get_total_counts() == 0, (placements, sent.get_comm_counts())
    assert [y.placements for y in outputs] == [(p,) for p in of_outputs]
    assert [grad.placements for grad in gradients] == [(p,) for p in of_gradients]
    assert all(map(torch.equal, whole(outputs), expected[0]))
    torch.testing.assert_close(whole(gradients), expected[1], rtol=1e-5, atol=1e-5)


def norms(mesh):
    weight, bias = normal(64, seed=2), normal(64, seed=3)
    # whole, evenly split, and not
    for rows, partial, length in (
        (WHOLE, WHOLE, 4),
        (Shard(0), Partial(), 4),
        (Shard(1), Partial(), 3),
    ):
        operands = [normal(2, length, 64), weight, bias]
        placements, grads = [rows, WHOLE, WHOLE], [rows, partial, partial]
        with count_launches() as launches:
            check(mesh, layer_norm, operands, placements, [rows], grads)
        assert (launches["norm_forward"], launches["norm_backward"]) == (3, 2)


def a_split_hidden_size_is_gathered(mesh):
    x, weight = normal(2, 4, 64), 0.5 + normal(64, seed=2).abs()
    parts = distributed(mesh, [x, weight], [Shard(2), WHOLE])
    with CommDebugMode() as sent:
        y = rms_norm(*parts)
    assert sent.get_total_counts() > 0
    assert torch.equal(y.full_tensor(), rms_norm(x, weight))


def a_gradient_in_another_placement_moves(mesh):
    x, dy, weight = normal(4, 6, 64), normal(4, 6, 64, seed=1), torch.full((64,), 0.5)
    _, expected = step(rms_norm, [x, weight], [dy])
    parts = distributed(mesh, [x, weight], [Shard(0), WHOLE])
    _, gradients = step(rms_norm, parts, distributed(mesh, [dy], [Shard(1)]))
    torch.testing.assert_close(whole(gradients), expected, rtol=1e-5, atol=1e-5)


def gates_heads_and_groups(mesh):
    def gated(x, weight, gate):
        return fused_norm(x, weight, None, GATED, gate=gate)

    def per_head(x, weight, bias):
        return fused_norm(x, weight, bias, PER_HEAD)

    def grouped(x, weight):
        return fused_norm(x, weight, None, GROUPED)

    x, gate, weight = normal(2, 4, 64), normal(2, 4, 64, seed=1), normal(64, seed=3)
    rows, operands = Shard(1), [x, weight, gate]
    of_gradients = [rows, Partial(), rows]
    check(mesh, gated, operands, [rows, WHOLE, rows], [rows], of_gradients)
    operands = [normal(2, 3, 4, 16), normal(4, 16, seed=2), normal(4, 16, seed=3)]
    heads = [Shard(2), Shard(0), Shard(0)]
    check(mesh, per_head, operands, heads, [Shard(2)], heads)
    # Groups are rows of their own: a hidden size split between them is not gathered.
    groups = [Shard(2), Shard(0)]
    check(mesh, grouped, [x, weight], groups, [Shard(2)], groups)


def two_dimensions_of_a_mesh():
    """(data, sequence): each dimension of the mesh splits one of the rows'."""
    mesh = init_device_mesh("cpu", (2, 1))
    x, weight = normal(4, 6, 64), torch.full((64,), 0.7)
    split = Shard(0), Shard(1)
    y = rms_norm(distribute_tensor(x, mesh, split), distribute_tensor(weight, mesh))
    assert y.placements == split
    assert torch.equal(y.full_tensor(), rms_norm(x, weight))


def compiled(mesh):
    operands = [normal(2, 4, 64), torch.full((64,), 0.7)]
    function = torch.compile(rms_norm, backend="aot_eager", fullgraph=True)
    y = function(*distributed(mesh, operands, [Shard(1), WHOLE]))
    assert y.placements == (Shard(1),)
    assert torch.equal(y.full_tensor(), rms_norm(*operands))


def work(rank):
    mesh = init_device_mesh("cpu", (2,))
    with use_backend("triton"):
        norms(mesh)
        a_split_hidden_size_is_gathered(mesh)
        a_gradient_in_another_placement_moves(mesh)
        gates_heads_and_groups(mesh)
        two_dimensions_of_a_mesh()
        compiled(mesh)


def test_rows_stay_split_and_gradients_of_parameters_are_partial_sums(
    tmp_path, monkeypatch
):
    run_ranks(work, tmp_path, monkeypatch)
