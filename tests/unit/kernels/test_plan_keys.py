"""A plan that was made for one call is used for no other: each call here comes after all others of its kind."""

import pytest
import torch

from hf_rmsnorm.formula import NormSpec
from hf_rmsnorm.kernels import plan
from hf_rmsnorm.ops.backend import device_refusal

pytestmark = pytest.mark.skipif(device_refusal("cpu") is not None, reason="needs TRITON_INTERPRET=1")
if device_refusal("cpu") is None:
    from hf_rmsnorm.kernels import launch, launch_qk
    from hf_rmsnorm.kernels.compiled import Kernel

D = 24
RMS = NormSpec(False, 1e-2, rounding="before_weight")
BIASED = NormSpec(False, 1e-2, has_bias=True)
BF16 = torch.bfloat16


def rows(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


X = rows(2, 3, D)
OTHER = rows(2, 3, D, seed=1)
W, B = rows(D, seed=2) + 1.5, rows(D, seed=3)


def layouts(t):
    """t as it is, with its rows in another order, with gaps between them, and with gaps between elements."""
    yield "", t.contiguous()
    yield "transposed", t.transpose(0, 1).contiguous().transpose(0, 1)
    yield "with gaps", torch.cat([t, t], -1)[..., : t.shape[-1]]
    yield "in every other column", torch.stack([t, t], -1)[..., 0]


def norms():
    """Name -> (x, weight, bias, spec, gate, residual), all x of one shape."""
    for layout, x in layouts(X):
        yield f"x {layout}", (x, W, None, RMS, None, None)
    for layout, other in layouts(OTHER):
        yield f"residual {layout}", (X, W, None, RMS, None, other)
        yield f"gate {layout}", (X, W, None, NormSpec(False, 1e-2, gate="silu_after"), other, None)
    yield "fewer rows", (X[:1], W, None, RMS, None, None)
    yield "x in bfloat16", (X.to(BF16), W, None, RMS, None, None)
    yield "weight in bfloat16", (X.to(BF16), W.to(BF16), None, RMS, None, None)
    yield "weight's dtype decides", (X.to(BF16), W, None, NormSpec(False, 1e-2, rounding="weight_dtype"), None, None)
    yield "residual in bfloat16", (X, W, None, RMS, None, OTHER.to(BF16))
    yield "gate in bfloat16", (X, W, None, NormSpec(False, 1e-2, gate="silu_after"), OTHER.to(BF16), None)
    yield "bias", (X, W, B, BIASED, None, None)
    yield "bias in bfloat16", (X, W, B.to(BF16), BIASED, None, None)
    yield "no weight", (X, None, None, NormSpec(False, 1e-2, has_weight=False), None, None)
    yield "a weight for each head", (X, rows(3, D, seed=4) + 1.5, None, RMS, None, None)
    yield "offset", (X, W, None, NormSpec(False, 1e-2, weight_offset=1.0), None, None)
    yield "eps", (X, W, None, NormSpec(False, 0.5, rounding="before_weight"), None, None)
    yield "centred", (X, W, B, NormSpec(True, 1e-2, has_bias=True, functional=True), None, None)
    yield "gate before", (X, W, None, NormSpec(False, 1e-2, gate="silu_before"), OTHER, None)


def forward(x, weight, bias, spec, gate, residual):
    return launch.norm_forward(x, weight, bias, spec, True, gate, residual)


def backwards():
    """Name -> (dy, x, weight, bias, spec, need, gate, dh, from_output)."""
    all_of, dy = (True, True, True), rows(2, 3, D, seed=5)
    for name, (x, weight, bias, spec, gate, residual) in norms():
        if residual is None:
            need = (True, weight is not None, bias is not None, *([True] if gate is not None else []))
            yield name, (dy.to(x.dtype)[: len(x)], x, weight, bias, spec, need, gate, None, False)
    for layout, each in layouts(dy):
        yield f"dy {layout}", (each, X, W, B, BIASED, all_of, None, None, False)
        yield f"dh {layout}", (dy, X, W, B, BIASED, all_of, None, each, False)
    yield "dy in bfloat16", (dy.to(BF16), X, W, B, BIASED, all_of, None, None, False)
    yield "dh in bfloat16", (dy, X, W, B, BIASED, all_of, None, dy.to(BF16), False)
    yield "from the output", (dy, X, W, B, BIASED, all_of, None, None, True)
    for need in ((True, False, False), (False, True, False), (False, False, True), (True, True, False)):
        yield f"need {need}", (dy, X, W, B, BIASED, need, None, None, False)


def backward(dy, x, weight, bias, spec, need, gate, dh, from_output):
    y, rstd, mean, _ = launch.norm_forward(x, weight, bias, spec, True, gate)
    x, mean = (y, None) if from_output else (x, mean)
    return launch.norm_backward(dy, x, weight, bias, rstd, mean, spec, need, gate, dh, from_output)


def heads_of(count, seed):
    """(2, count, 3, 16) queries or keys in three layouts."""
    t = rows(2, count, 3, 16, seed=seed)
    yield "", t
    yield "transposed", t.transpose(1, 2).contiguous().transpose(1, 2)
    yield "with gaps", torch.cat([t, t], -1)[..., :16]


def pairs():
    """Name -> (q, k, q_weight, k_weight, cos, sin, spec)."""
    (_, q), (_, k) = next(heads_of(4, 0)), next(heads_of(2, 1))
    weights = rows(16, seed=2), rows(16, seed=3)
    tables = rows(1, 3, 16, seed=4), rows(1, 3, 16, seed=5)
    for layout, each in heads_of(4, 0):
        yield f"q {layout}", (each, k, *weights, *tables, RMS)
    for layout, each in heads_of(2, 1):
        yield f"k {layout}", (q, each, *weights, *tables, RMS)
    yield "more keys", (q, rows(2, 4, 3, 16, seed=1), *weights, *tables, RMS)
    yield "fewer queries in their strides", (q[:, :2], k, *weights, *tables, RMS)
    yield "fewer keys in their strides", (q, rows(2, 4, 3, 16, seed=1)[:, :2], *weights, *tables, RMS)
    yield "no tables", (q, k, *weights, None, None, RMS)
    yield "a table for each sequence", (q, k, *weights, *(torch.cat([t, t + 1]) for t in tables), RMS)
    yield "tables with gaps", (q, k, *weights, *(torch.cat([t, t], -1)[..., :16] for t in tables), RMS)
    yield "half is turned", (q, k, *weights, *(t[..., :8].contiguous() for t in tables), RMS)
    yield "tables in bfloat16", (q, k, *weights, *(t.to(BF16) for t in tables), RMS)
    yield "weights in bfloat16", (q.to(BF16), k.to(BF16), *(w.to(BF16) for w in weights), *tables, RMS)
    yield "in bfloat16", (q.to(BF16), k.to(BF16), *weights, *tables, RMS)
    yield "no weights", (q, k, None, None, *tables, NormSpec(False, 1e-2, has_weight=False))
    yield "centred", (q, k, *weights, *tables, NormSpec(True, 1e-2))
    yield "eps", (q, k, *weights, *tables, RMS.with_eps(0.5))


def pair_forward(q, k, q_weight, k_weight, *others):
    return launch_qk.qk_norm_forward(q, k, (q_weight, k_weight, None, None), *others, True)


def pair_backwards():
    """Name -> (gradients of q' and k', what is needed, the operands of the forward)."""
    made = dict(pairs())
    for name, operands in made.items():
        has_weight = operands[2] is not None
        yield name, ("", "", (True, True, has_weight, has_weight), operands)
    plain = made["q "]
    for layout in ("transposed", "with gaps"):
        yield f"dq {layout}", (layout, "", (True,) * 4, plain)
        yield f"dk {layout}", ("", layout, (True,) * 4, plain)
    yield "no dq", (None, "", (True,) * 4, plain)
    yield "no dk", ("", None, (True,) * 4, plain)
    for need in ((True, False, False, False), (False, True, False, False), (False, False, True, True)):
        yield f"need {need}", ("", "", need, plain)


def pair_backward(dq, dk, need, operands):
    yq, yk, rstd, mean = pair_forward(*operands)
    dq, dk = (
        None if layout is None else dict(heads_of(y.shape[1], seed))[layout].to(y.dtype)
        for y, layout, seed in ((yq, dq, 6), (yk, dk, 7))
    )
    q, k, q_weight, k_weight, *tables, spec = operands
    parameters = q_weight, k_weight, None, None
    return launch_qk.qk_norm_backward(dq, dk, q, k, parameters, *tables, rstd, mean, spec, (*need, False, False))


KINDS = {"forward": (forward, norms), "backward": (backward, backwards),
         "queries and keys": (pair_forward, pairs), "their backward": (pair_backward, pair_backwards)}  # fmt: skip
CASES = [(kind, name) for kind, (_, calls) in KINDS.items() for name, _ in calls()]


def seen(tensors):
    return [None if t is None else (t.dtype, t.stride(), t.tolist()) for t in tensors]


@pytest.mark.parametrize("kind, name", CASES, ids=[f"{kind}, {name}" for kind, name in CASES])
def test_a_call_behind_all_others_gives_what_it_gives_alone(kind, name, monkeypatch):
    run, calls = KINDS[kind][0], dict(KINDS[kind][1]())
    monkeypatch.setattr(plan, "_plans", {})
    alone = seen(run(*calls[name]))
    monkeypatch.setattr(plan, "_plans", {})
    with monkeypatch.context() as planned_only:
        planned_only.setattr(Kernel, "__call__", lambda *args, **options: None)
        for other, operands in calls.items():
            if other != name:
                run(*operands)
    assert seen(run(*calls[name])) == alone
