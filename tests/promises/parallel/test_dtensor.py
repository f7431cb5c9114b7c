"""DTensors pass through the registered operators, gradients included: two gloo processes on the CPU."""

import pytest
import torch
from parallel_runs import run_ranks
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from hf_rmsnorm import NormSpec, count_launches, layer_norm, rms_norm, use_backend
from hf_rmsnorm.ops import add_norm_backend, fused_add_norm, fused_norm, fused_qk_norm, qk_norm_backend

pytestmark = pytest.mark.full

LLAMA = NormSpec(centered=False, eps=1e-6)
PER_HEAD = NormSpec(centered=True, eps=1e-6, has_bias=True)
GATED = NormSpec(centered=False, eps=1e-6, gate="silu_after")
FEWER_ROWS = Replicate(), Shard(0), Shard(1)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole_run(function, operands, dys):
    leaves = [t.clone().requires_grad_() for t in operands]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    used = [(y, dy) for y, dy in zip(outputs, dys, strict=True) if dy is not None]
    torch.autograd.backward(*zip(*used, strict=True))
    return outputs, [t.grad for t in leaves]


def check(mesh, function, operands, placements, dys, expected, gathers=False, dy_placements=None):
    """Outputs and gradients of distributed operands, where they lie, and that nothing was sent for it.

    Args:
        placements: of each operand.
        expected: placement of every output; and of each operand's gradient.
        gathers: whether something is to be sent.
        dy_placements: of the gradients given; the outputs' own by default.
    """
    outputs, gradients = expected
    ys, grads = whole_run(function, operands, dys)
    # Without gradients first: what DTensor remembers of this call must not be taken for the next.
    with torch.no_grad():
        for a, b in zip(_tuple(function(*(distribute_tensor(*o) for o in _on(mesh, operands, placements)))), ys,
                        strict=True):  # fmt: skip
            assert torch.equal(a.full_tensor(), b)
    leaves = [distribute_tensor(*o).requires_grad_() for o in _on(mesh, operands, placements)]
    given = [None if dy is None else distribute_tensor(dy, mesh, [p]) for dy, p in zip(
        dys, dy_placements or outputs, strict=True)]  # fmt: skip
    with CommDebugMode() as sent:
        got = _tuple(function(*leaves))
        torch.autograd.backward(*zip(*[(y, d) for y, d in zip(got, given, strict=True) if d is not None], strict=True))
    assert bool(sent.get_total_counts()) == gathers, (placements, sent.get_comm_counts())
    for y, whole, placement in zip(got, ys, outputs, strict=True):
        assert placement is None or y.placements == (placement,), (placements, y.placements)
        assert torch.equal(y.full_tensor(), whole)
    for leaf, whole, placement in zip(leaves, grads, gradients, strict=True):
        assert placement is None or leaf.grad.placements == (placement,), (placements, leaf.grad.placements)
        torch.testing.assert_close(leaf.grad.full_tensor(), whole, rtol=1e-5, atol=1e-5)


def _tuple(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _on(mesh, operands, placements):
    return [(t, mesh, [p]) for t, p in zip(operands, placements, strict=True)]


def norms(mesh):
    """One launch each way for (batch, length, hidden_size) split over any but the last dimension."""
    functions = {
        "rms": (lambda x, w: rms_norm(x, w), 1),
        "layer": (lambda x, w, b: layer_norm(x, w, b), 2),
        "rms without weight": (lambda x: rms_norm(x), 0),
        "bias alone": (lambda x, b: rms_norm(x, bias=b), 1),
    }
    for length in (4, 3, 1):  # evenly; not evenly; and fewer than ranks, which DTensor itself gathers
        x, dy = normal(2, length, 64), normal(2, length, 64, seed=1)
        parameters = [torch.rand(64, generator=torch.Generator().manual_seed(s)) for s in (2, 3)]
        for name, (function, count) in functions.items():
            if length != 4 and name != "layer":
                continue
            operands = [x, *parameters[:count]]
            for rows in FEWER_ROWS:
                gathers = length == 1 and rows == Shard(1)
                to = Replicate() if gathers else rows
                of_parameters = [Replicate() if to == Replicate() else Partial()] * count
                with count_launches() as launches:
                    check(mesh, function, operands, [rows, *[Replicate()] * count], [dy],
                          ([to], [to, *of_parameters]), gathers)  # fmt: skip
                assert (launches["norm_forward"], launches["norm_backward"]) == (3, 2)
            check(mesh, function, operands, [Shard(2), *[Replicate()] * count], [dy],
                  ([None], [None] * (1 + count)), True, [Shard(2)])  # fmt: skip
    # A gradient that arrives in another placement moves, and so does what was kept for it.
    x, dy, weight = normal(4, 6, 64), normal(4, 6, 64, seed=1), torch.rand(64)
    weight = weight.fill_(0.5)
    for rows, of_dy in ((Shard(0), Shard(1)), (Shard(1), Shard(0)), (Shard(1), Replicate()), (Replicate(), Shard(1))):
        check(mesh, functions["rms"][0], [x, weight], [rows, Replicate()], [dy], ([rows], [None] * 2),
              Replicate() not in (rows, of_dy), [of_dy])  # fmt: skip
        check(mesh, lambda x, w: rms_norm(x.transpose(0, 1), w), [x, weight], [rows, Replicate()], [dy.transpose(0, 1)],
              ([None], [None] * 2), Replicate() not in (rows, of_dy), [_transposed(of_dy)])  # fmt: skip


def _transposed(placement):
    return Shard(1 - placement.dim) if isinstance(placement, Shard) else placement


def gates_heads_and_groups(mesh):
    x, gate, dy = (normal(2, 4, 64, seed=s) for s in range(3))
    weight = 0.5 + torch.rand(64, generator=torch.Generator().manual_seed(3))
    for rows in FEWER_ROWS:
        partial = Replicate() if rows == Replicate() else Partial()
        check(mesh, lambda x, w, g: fused_norm(x, w, None, GATED, gate=g), [x, weight, gate],
              [rows, Replicate(), rows], [dy], ([rows], [rows, partial, rows]))  # fmt: skip
    x, dy = (normal(2, 3, 4, 16, seed=s) for s in range(2))
    weight, bias = (0.5 + torch.rand(4, 16, generator=torch.Generator().manual_seed(s)) for s in (2, 3))
    for rows in (*FEWER_ROWS, Shard(2)):
        whole = Shard(0) if rows == Shard(2) else Replicate()
        partial = {Replicate(): Replicate(), Shard(2): Shard(0)}.get(rows, Partial())
        check(mesh, lambda x, w, b: fused_norm(x, w, b, PER_HEAD), [x, weight, bias], [rows, whole, whole], [dy],
              ([rows], [rows, partial, partial]))  # fmt: skip
    # Groups are rows of their own: a hidden size split between them is not gathered.
    grouped = NormSpec(centered=False, eps=1e-6, group_size=16)
    x, dy = (normal(2, 4, 64, seed=s) for s in range(2))
    weight = 0.5 + torch.rand(64, generator=torch.Generator().manual_seed(3))
    for rows, whole, partial in (
        (Shard(1), Replicate(), Partial()),
        (Shard(2), Shard(0), Shard(0)),
    ):
        check(mesh, lambda x, w: fused_norm(x, w, None, grouped), [x, weight], [rows, whole], [dy],
              ([rows], [rows, partial]))  # fmt: skip


def sums(mesh):
    operands = [normal(2, 4, 64, seed=0), normal(2, 4, 64, seed=1), 0.5 + torch.rand(64)]
    operands[2].fill_(0.7)
    dys = [normal(2, 4, 64, seed=s) for s in (4, 5)]
    for rows in FEWER_ROWS:
        partial = Replicate() if rows == Replicate() else Partial()
        placements = [rows, rows, Replicate()]
        given = [distribute_tensor(*o) for o in _on(mesh, operands, placements)]
        assert add_norm_backend(*given, None, LLAMA) == "triton"
        check(mesh, lambda x, r, w: fused_add_norm(x, r, w, None, LLAMA), operands, placements, dys,
              ([rows, rows], [rows, rows, partial]))  # fmt: skip
        with count_launches() as launches:
            fused_add_norm(*given, None, LLAMA)
        assert launches == {"norm_forward": 1}
    # A row-wise linear's partial sums are added up for the norm, wherever it lies then.
    x = DTensor.from_local(operands[0] / 2, mesh, [Partial()])
    residual = distribute_tensor(operands[1], mesh, [Shard(1)])
    with CommDebugMode() as sent:
        h, y = fused_add_norm(x, residual, given[2], None, LLAMA)
    expected = fused_add_norm(*operands, None, LLAMA)
    assert sent.get_total_counts() == 1 and h.placements == y.placements == (Shard(1),)
    for a, b in zip((h, y), expected, strict=True):
        torch.testing.assert_close(a.full_tensor(), b)


def queries_and_keys(mesh):
    q, k = normal(2, 4, 6, 16, seed=0), normal(2, 2, 6, 16, seed=1)
    weights = [torch.full((16,), 0.7), torch.full((16,), 1.3)]
    dys = [normal(2, 4, 6, 16, seed=4), normal(2, 2, 6, 16, seed=5)]
    for tables in (0, 2, 1):  # no rotary embedding; one for each sequence; one for all
        angles = normal(max(tables, 1), 6, 8, seed=6)
        cos, sin = (torch.cat((t, t), -1) for t in (angles.cos(), angles.sin()))
        for rows in (Replicate(), Shard(0), Shard(1), Shard(2)) if tables != 1 else (Shard(0),):
            partial = Replicate() if rows == Replicate() else Partial()
            split = {Shard(2): Shard(1), Shard(0): Shard(0) if tables == 2 else Replicate()}.get(rows, Replicate())
            local = [distribute_tensor(t, mesh, [split]) for t in (cos, sin)]

            def function(q, k, wq, wk, cos=cos, sin=sin, local=local, tables=tables):
                angles = () if not tables else local if isinstance(q, DTensor) else (cos, sin)
                return fused_qk_norm(q, k, wq, wk, LLAMA, *angles)

            given = [distribute_tensor(t, mesh, [p]) for t, p in zip([q, k, *weights],
                     [rows, rows, Replicate(), Replicate()], strict=True)]  # fmt: skip
            assert qk_norm_backend(*given, LLAMA, *(local if tables else ())) == "triton"
            for grads in (dys, [dys[0], None]):
                expected = [rows, rows if grads[1] is not None else None, partial, None]
                if grads[1] is None:
                    one_sided(mesh, function, [q, k, *weights], rows, grads[0])
                    continue
                check(mesh, function, [q, k, *weights], [rows, rows, Replicate(), Replicate()], grads,
                      ([rows, rows], expected))  # fmt: skip
    # Three heads for two ranks
    check(mesh, lambda q, k, wq, wk: fused_qk_norm(q, k, wq, wk, LLAMA), [q[:, :3], q[:, 1:], *weights],
          [Shard(1), Shard(1), Replicate(), Replicate()], [dys[0][:, :3]] * 2,
          ([Shard(1), Shard(1)], [Shard(1), Shard(1), Partial(), Partial()]))  # fmt: skip
    # One kv head for two ranks
    check(mesh, lambda q, k, wq, wk: fused_qk_norm(q, k, wq, wk, LLAMA), [q, k[:, :1], *weights],
          [Shard(1), Replicate(), Replicate(), Replicate()], [dys[0], dys[1][:, :1]],
          ([None, None], [None] * 4), True, [Shard(1), Replicate()])  # fmt: skip


def one_sided(mesh, function, operands, rows, dq):
    """k is not used."""
    expected = [t.clone().requires_grad_() for t in operands]
    function(*expected)[0].backward(dq)
    leaves = [distribute_tensor(t, mesh, [p]).requires_grad_() for t, p in zip(operands,
              [rows, rows, Replicate(), Replicate()], strict=True)]  # fmt: skip
    function(*leaves)[0].backward(distribute_tensor(dq, mesh, [rows]))
    for leaf, whole in zip(leaves, expected, strict=True):
        assert (leaf.grad is None) == (whole.grad is None)
        if whole.grad is not None:
            torch.testing.assert_close(leaf.grad.full_tensor(), whole.grad, rtol=1e-5, atol=1e-5)


def two_dimensions_of_a_mesh():
    """(data, sequence): each dimension of the mesh splits one of the rows'."""
    mesh = init_device_mesh("cpu", (2, 1))
    x, dy, weight = normal(4, 6, 64), normal(4, 6, 64, seed=1), torch.full((64,), 0.7)
    (y,), (dx, dw) = whole_run(rms_norm, [x, weight], [dy])
    for placements in ((Shard(0), Shard(1)), (Shard(1), Replicate()), (Shard(1), Shard(1))):
        sx, sw = (distribute_tensor(t, mesh, p).requires_grad_() for t, p in ((x, placements), (weight, None)))
        sdy = distribute_tensor(dy, mesh, placements)
        with CommDebugMode() as sent:
            sy = rms_norm(sx, sw)
            sy.backward(sdy)
        assert sent.get_total_counts() == 0 and sy.placements == sx.grad.placements == placements
        assert torch.equal(sy.full_tensor(), y)
        torch.testing.assert_close(sx.grad.full_tensor(), dx)
        torch.testing.assert_close(sw.grad.full_tensor(), dw)


def compiled_and_differentiated_twice(mesh):
    x, dy, weight = normal(2, 4, 64), normal(2, 4, 64, seed=1), torch.full((64,), 0.7)
    (y,), grads = whole_run(rms_norm, [x, weight], [dy])
    leaves = [distribute_tensor(*o).requires_grad_() for o in _on(mesh, [x, weight], [Shard(1), Replicate()])]
    function = torch.compile(rms_norm, backend="aot_eager", fullgraph=True)
    got = function(*leaves)
    got.backward(distribute_tensor(dy, mesh, [Shard(1)]))
    assert got.placements == leaves[0].grad.placements == (Shard(1),) and torch.equal(got.full_tensor(), y)
    for leaf, whole in zip(leaves, grads, strict=True):
        torch.testing.assert_close(leaf.grad.full_tensor(), whole)

    def penalty(x, weight):
        (dx,) = torch.autograd.grad(rms_norm(x, weight).pow(2).sum(), x, create_graph=True)
        return torch.autograd.grad(dx.pow(2).sum(), weight)[0]

    whole = penalty(x.requires_grad_(), weight.requires_grad_())
    operands = _on(mesh, [x.detach(), weight.detach()], [Shard(1), Replicate()])
    leaves = [distribute_tensor(*o).requires_grad_() for o in operands]
    torch.testing.assert_close(penalty(*leaves).full_tensor(), whole)


def work(rank):
    mesh = init_device_mesh("cpu", (2,))
    with use_backend("triton"):
        norms(mesh)
        gates_heads_and_groups(mesh)
        sums(mesh)
        queries_and_keys(mesh)
        two_dimensions_of_a_mesh()
        compiled_and_differentiated_twice(mesh)


def test_rows_stay_split_and_gradients_of_parameters_are_partial_sums(tmp_path, monkeypatch):
    run_ranks(work, tmp_path, monkeypatch)
