"""Which implementation serves a call: what no kernel computes is refused, never
computed as something else.
"""

import pytest
import torch

from hf_rmsnorm import NormSpec
from hf_rmsnorm.kernels.sizes import MAX_HIDDEN_SIZE, forward_config
from hf_rmsnorm.ops.backend import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_ROWS,
    _device_refusal,
    device_refusal,
    why_not,
    why_not_qk,
)

D, RMS, BIASED = (
    8,
    NormSpec(False, 1e-6, rounding="before_weight"),
    NormSpec(False, 1e-6, has_bias=True),
)
W = torch.ones(D)


def of(rows, columns=D):
    """So many rows, in the memory of one."""
    return torch.ones(1, columns).expand(rows, columns)


@pytest.mark.parametrize(
    "said, x, weight, bias, spec, gate",
    [
        ("x is torch.float64", of(2).double(), W, None, RMS, None),
        ("shape (), is not between 1 and", torch.ones(()), None, None, NormSpec(False, 1e-6, has_weight=False), None),
        ("is not between 1 and", of(1, MAX_HIDDEN_SIZE + 1), of(1, MAX_HIDDEN_SIZE + 1)[0], None, RMS, None),
        ("do not divide rows of 8", of(2), W, None, NormSpec(False, 1e-6, group_size=3), None),
        ("has a gate and the call has none", of(2), W, None, NormSpec(False, 1e-6, gate="silu_after"), None),
        ("or the other way round", of(2), W, None, RMS, of(2)),
        ("weight is torch.float64", of(2), W.double(), None, RMS, None),
        ("bias is torch.int64", of(2), W, W.long(), BIASED, None),
        ("weight has shape (7,) where x has 8 columns", of(2), W[:7], None, RMS, None),
        ("weight has shape (2, 8) where x", of(3)[None], of(2), None, RMS, None),
        ("weight has shape (8, 3) where x", of(2), of(D, 3), None, RMS, None),
        ("too many rows", torch.ones(1, 0, D), of(0), None, RMS, None),
        ("too many rows", of(MAX_HEADS + 1)[None], of(MAX_HEADS + 1), None, RMS, None),
        ("too many rows", of(2)[None], of(2), None, NormSpec(False, 1e-6, group_size=4), None),
        ("weight and bias differ in shape", of(2)[None], of(2), W, BIASED, None),
        ("weight is on meta and x on cpu", of(2), W.to("meta"), None, RMS, None),
        ("bias is on meta and x on cpu", of(2), W, W.to("meta"), BIASED, None),
        ("gate is torch.float64", of(2), W, None, NormSpec(False, 1e-6, gate="silu_after"), of(2).double()),
        ("gate is torch.float32 of shape (1, 8)", of(2), W, None, NormSpec(False, 1e-6, gate="silu_after"), of(1)),
        ("on meta, x", of(2), W, None, NormSpec(False, 1e-6, gate="silu_after"), of(2).to("meta")),
        (f"more than {MAX_ROWS} rows", of(MAX_ROWS + 1), W, None, RMS, None),
        (f"more than {MAX_ROWS // 2} rows", of(MAX_ROWS // 2 + 1)[:, None], of(1), None, RMS, None),
        (f"more than {MAX_ROWS // 2} rows", of(MAX_ROWS // 4 + 1), W, None, NormSpec(False, 1e-6, group_size=4), None),
    ],
)  # fmt: skip
def test_what_no_kernel_serves_is_refused_in_words(said, x, weight, bias, spec, gate):
    assert said in why_not(spec, x, weight, bias, gate)


@pytest.mark.parametrize(
    "x, weight, bias, spec, gate",
    [
        (of(MAX_ROWS), W, None, RMS, None),
        (of(MAX_ROWS // 2)[:, None], of(1), None, RMS, None),
        (of(MAX_HEADS)[None], of(MAX_HEADS), of(MAX_HEADS), BIASED, None),
        (of(2, MAX_HIDDEN_SIZE), of(1, MAX_HIDDEN_SIZE)[0], None, RMS, None),
        (of(2, MAX_HIDDEN_SIZE)[None], of(2, MAX_HIDDEN_SIZE), None, RMS, None),
        (of(2, 1), torch.ones(1), None, RMS, None),
        (of(2), W, None, NormSpec(False, 1e-6, gate="silu_after"), of(2).half()),
        (of(2).half(), W.bfloat16(), None, RMS, None),
    ],
)
@pytest.mark.skipif(
    device_refusal("cpu") is not None, reason="needs TRITON_INTERPRET=1"
)
def test_the_largest_and_the_smallest_are_served(x, weight, bias, spec, gate):
    assert why_not(spec, x, weight, bias, gate) is None


@pytest.mark.parametrize(
    "device_type, hip, capability, served",
    [
        ("cuda", None, (8, 0), True), ("cuda", None, (7, 5), True), ("cuda", None, (7, 2), False),
        ("cuda", None, (6, 1), False), ("cuda", "6.4", (6, 1), True),
        ("xpu", None, None, True), ("mps", None, None, False), ("cpu", None, None, False), ("meta", None, None, False),
    ],
)  # fmt: skip
def test_which_devices_kernels_run_on(
    device_type, hip, capability, served, monkeypatch
):
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    assert (_device_refusal.__wrapped__(device_type, 0) is None) == served


@pytest.mark.parametrize(
    "built_for, served", [(["sm_70", "sm_75"], True), (["sm_75", "sm_80"], False)]
)
def test_a_v100_is_served_where_torch_is_built_for_it(built_for, served, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built_for)
    said = _device_refusal.__wrapped__("cuda", 0)
    assert (
        said is None
        if served
        else said.startswith(
            "this GPU has compute capability 7.0; the kernels serve 7.5 (T4"
        )
    )


def test_row_numbers_stay_below_32_bits_in_the_last_tile():
    """Whatever the width: a tile may reach past the last row, and heads multiply what
    it reaches past.
    """
    most = max(forward_config(n).rows for n in range(1, MAX_HIDDEN_SIZE + 1))
    assert MAX_ROWS + most < 2**31 and 2 * (MAX_ROWS // 2) + most * MAX_HEADS < 2**32


def pair(
    batch=2,
    length=3,
    head_dim=4,
    heads=(4, 2),
    dtype=torch.float32,
    tables=4,
    spec=RMS,
    **of,
):
    """Operands that one launch takes, but for those in `of`: spec, q, k, their weights,
    cos and sin.
    """
    q, k = (torch.ones(batch, count, length, head_dim, dtype=dtype) for count in heads)
    weights = {name: torch.ones(head_dim) for name in ("q_weight", "k_weight")}
    angles = {name: torch.ones(1, length, tables) for name in ("cos", "sin")}
    operands = {"q": q, "k": k, **weights, **angles, **of}
    return [spec, *operands.values()]


SUMS = [
    ("residual is torch.float64", of(2), of(2).double(), W, RMS),
    ("residual is torch.float32 of shape (1, 8)", of(2), of(1), W, RMS),
    ("on meta, x", of(2), of(2).to("meta"), W, RMS),
    (
        "the sum of torch.bfloat16 and torch.float16 is neither",
        of(2).bfloat16(),
        of(2).half(),
        W,
        RMS,
    ),
    (
        "a parameter of heads is not read behind a sum",
        of(2)[None],
        of(2)[None],
        of(2),
        RMS,
    ),
    (
        "which the kernels do not compute",
        of(2),
        of(2),
        W,
        NormSpec(False, 1e-6, gate="silu_after"),
    ),
    (
        "which the kernels do not compute",
        of(2),
        of(2),
        W,
        NormSpec(False, 1e-6, group_size=4),
    ),
]


@pytest.mark.parametrize("said, x, residual, weight, spec", SUMS)
def test_what_no_kernel_adds_is_refused_in_words(said, x, residual, weight, spec):
    assert said in why_not(spec, x, weight, None, None, residual)


class Tagged(torch.Tensor):
    """A subclass, of which nobody knows what it makes of an operator."""


WEIGHTLESS = NormSpec(False, 1e-6, has_weight=False)
MANY = of(MAX_ROWS // 2, 4)[None, None]


@pytest.mark.parametrize(
    "operands",
    [
        pair(),
        pair(q_weight=None, k_weight=None, spec=WEIGHTLESS),
        pair(spec=NormSpec(False, 1e-6, weight_offset=1.0, rounding="before_weight")),
        pair(head_dim=2, tables=2),
        pair(head_dim=MAX_HEAD_DIM),
        pair(head_dim=8, tables=2),
        pair(heads=(4, 0)),
        pair(cos=torch.ones(2, 3, 4), sin=torch.ones(2, 3, 4)),
        pair(dtype=torch.bfloat16),
        pair(q=torch.ones(2, 3, 4, 4).transpose(1, 2)),
        pair(
            q=MANY,
            k=MANY,
            cos=of(MAX_ROWS // 2, 4)[None],
            sin=of(MAX_ROWS // 2, 4)[None],
        ),
    ],
)
@pytest.mark.skipif(
    device_refusal("cpu") is not None, reason="needs TRITON_INTERPRET=1"
)
def test_queries_and_keys_that_one_launch_takes(operands):
    assert why_not_qk(*operands) is None


NARROW, WIDE = torch.ones(3), torch.ones(5)
HALVES = torch.ones(4).half()
GAPS = torch.ones(8)[::2]


@pytest.mark.parametrize(
    "said, operands",
    [
        ("its formula has centered", pair(spec=NormSpec(True, 1e-6))),
        ("its formula has has_bias", pair(spec=BIASED)),
        (
            "its formula has rounding",
            pair(spec=NormSpec(False, 1e-6, rounding="weight_dtype")),
        ),
        ("the call has none", pair(q_weight=None, k_weight=None)),
        ("the call has none", pair(k_weight=None)),
        ("or the other way round", pair(spec=WEIGHTLESS)),
        ("another class", pair(q=torch.ones(2, 4, 3, 4).as_subclass(Tagged))),
        ("another class", pair(sin=torch.ones(1, 3, 4).as_subclass(Tagged))),
        (
            "a pair of torch.float32 and torch.float16",
            pair(k=torch.ones(2, 2, 3, 4).half()),
        ),
        ("a pair of torch.float32 and torch.float16", pair(k_weight=HALVES)),
        (
            "a pair of torch.float32 and torch.float16",
            pair(sin=torch.ones(1, 3, 4).half()),
        ),
        ("several devices", pair(k=torch.ones(2, 2, 3, 4, device="meta"))),
        (
            "a dtype",
            pair(cos=torch.ones(1, 3, 4).double(), sin=torch.ones(1, 3, 4).double()),
        ),
        ("is not (batch, heads", pair(q=torch.ones(4, 3, 4))),
        ("is not (batch, heads", pair(k=torch.ones(1, 2, 2, 3, 4))),
        ("q is (2, 4, 3, 4) and k (1,", pair(k=torch.ones(1, 2, 3, 4))),
        ("q is (2, 4, 3, 4) and k (2, 2, 4,", pair(k=torch.ones(2, 2, 4, 4))),
        ("q is (2, 4, 3, 4) and k (2, 2, 3, 5)", pair(k=torch.ones(2, 2, 3, 5))),
        ("wide", pair(head_dim=MAX_HEAD_DIM + 2)),
        ("columns with gaps", pair(q=torch.ones(2, 4, 4, 3).transpose(2, 3))),
        ("columns with gaps", pair(k=torch.ones(2, 2, 4, 3).transpose(2, 3))),
        ("a weight of shape (3,)", pair(q_weight=NARROW)),
        ("a weight of shape (5,)", pair(k_weight=WIDE)),
        (
            "a weight of shape (4, 4)",
            pair(q_weight=torch.ones(4, 4), k_weight=torch.ones(2, 4)),
        ),
        (
            "a weight of shape (16,)",
            pair(q_weight=torch.ones(16), k_weight=torch.ones(8)),
        ),
        ("and strides (2,)", pair(k_weight=GAPS)),
        ("in one layout", pair(cos=torch.ones(3, 4), sin=torch.ones(3, 4))),
        ("in one layout", pair(sin=torch.ones(2, 3, 4))),
        ("in one layout", pair(sin=torch.ones(1, 3, 8)[..., :4])),
        (
            "in one layout",
            pair(cos=torch.ones(1, 3, 8)[..., ::2], sin=torch.ones(1, 3, 8)[..., ::2]),
        ),
        (
            "tables of shape (1, 2, 4)",
            pair(cos=torch.ones(1, 2, 4), sin=torch.ones(1, 2, 4)),
        ),
        (
            "tables of shape (3, 3, 4)",
            pair(cos=torch.ones(3, 3, 4), sin=torch.ones(3, 3, 4)),
        ),
        ("tables of shape (1, 3, 6)", pair(tables=6)),
        ("tables of shape (1, 3, 3)", pair(tables=3)),
        ("tables of shape (1, 3, 0)", pair(tables=0)),
        (
            f"more than {MAX_ROWS} rows",
            pair(q=of(MAX_ROWS, 4)[None, None], k=of(MAX_ROWS, 4)[None, None]),
        ),
    ],
)
def test_queries_and_keys_that_one_launch_does_not_take(said, operands):
    assert said in why_not_qk(*operands)
