"""Which implementation serves a call: what no kernel computes is refused, never computed as something else."""

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

D, RMS, BIASED = 8, NormSpec(False, 1e-6, rounding="before_weight"), NormSpec(False, 1e-6, has_bias=True)
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
@pytest.mark.skipif(device_refusal("cpu") is not None, reason="needs TRITON_INTERPRET=1")
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
def test_which_devices_kernels_run_on(device_type, hip, capability, served, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    assert (_device_refusal.__wrapped__(device_type, 0) is None) == served


@pytest.mark.parametrize("built_for, served", [(["sm_70", "sm_75"], True), (["sm_75", "sm_80"], False)])
def test_a_v100_is_served_where_torch_is_built_for_it(built_for, served, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built_for)
    said = _device_refusal.__wrapped__("cuda", 0)
    assert said is None if served else said.startswith("this GPU has compute capability 7.0; the kernels serve 7.5 (T4")


def test_row_numbers_stay_below_32_bits_in_the_last_tile():
    """Whatever the width: a tile may reach past the last row, and heads multiply what it reaches past."""
    most = max(forward_config(n).rows for n in range(1, MAX_HIDDEN_SIZE + 1))
    assert MAX_ROWS + most < 2**31 and 2 * (MAX_ROWS // 2) + most * MAX_HEADS < 2**32


def pair(batch=2, length=3, head_dim=4, heads=(4, 2), dtype=torch.float32, tables=4, **of):
    """Operands that one launch takes, but for what is given: spec, q, k, parameters, tables."""
    q, k = (torch.ones(batch, count, length, head_dim, dtype=dtype) for count in heads)
    made = {"q": q, "k": k, "q_weight": torch.ones(head_dim), "k_weight": torch.ones(head_dim), "q_bias": None,
            "k_bias": None, "spec": RMS} | {name: torch.ones(1, length, tables) for name in ("cos", "sin")}  # fmt: skip
    made |= of
    parameters = tuple(made[name] for name in ("q_weight", "k_weight", "q_bias", "k_bias"))
    return [made["spec"], made["q"], made["k"], parameters, (made["cos"], made["sin"])]


SUMS = [
    ("residual is torch.float64", of(2), of(2).double(), W, RMS),
    ("residual is torch.float32 of shape (1, 8)", of(2), of(1), W, RMS),
    ("on meta, x", of(2), of(2).to("meta"), W, RMS),
    ("the sum of torch.bfloat16 and torch.float16 is neither", of(2).bfloat16(), of(2).half(), W, RMS),
    ("a parameter of heads is not read behind a sum", of(2)[None], of(2)[None], of(2), RMS),
    ("which the kernels do not compute", of(2), of(2), W, NormSpec(False, 1e-6, gate="silu_after")),
    ("which the kernels do not compute", of(2), of(2), W, NormSpec(False, 1e-6, group_size=4)),
]


@pytest.mark.parametrize("said, x, residual, weight, spec", SUMS)
def test_what_no_kernel_adds_is_refused_in_words(said, x, residual, weight, spec):
    assert said in why_not(spec, x, weight, None, None, residual)


class Tagged(torch.Tensor):
    """A subclass, of which nobody knows what it makes of an operator."""


WEIGHTLESS = NormSpec(False, 1e-6, has_weight=False)


@pytest.mark.parametrize(
    "operands",
    [
        pair(),
        pair(cos=None, sin=None),
        pair(q_weight=None, k_weight=None, spec=WEIGHTLESS),
        pair(head_dim=1, cos=None, sin=None),
        pair(head_dim=MAX_HEAD_DIM),
        pair(head_dim=8, tables=2),
        pair(spec=BIASED, q_bias=torch.ones(4), k_bias=torch.ones(4), cos=None, sin=None),
        pair(q_weight=torch.ones(4, 4), k_weight=torch.ones(2, 4)),
        pair(q_weight=torch.ones(16), k_weight=torch.ones(8)),
        pair(heads=(2, 1), q_weight=torch.ones(8), k_weight=torch.ones(4)),
        pair(cos=torch.ones(2, 3, 4), sin=torch.ones(2, 3, 4)),
        pair(dtype=torch.bfloat16),
        pair(q=torch.ones(2, 3, 4, 4).transpose(1, 2)),
        pair(q=of(MAX_ROWS // 2, 4)[None, None], k=of(MAX_ROWS // 2, 4)[None, None], cos=None, sin=None),
    ],
)  # fmt: skip
@pytest.mark.skipif(device_refusal("cpu") is not None, reason="needs TRITON_INTERPRET=1")
def test_queries_and_keys_that_one_launch_takes(operands):
    assert why_not_qk(*operands) is None


@pytest.mark.parametrize(
    "operands",
    [
        pair(spec=BIASED, cos=None, sin=None),
        pair(spec=BIASED, q_bias=torch.ones(4), k_bias=torch.ones(4)),  # and a rotation behind the bias
        pair(q_bias=torch.ones(4), k_bias=torch.ones(4), cos=None, sin=None),
        pair(q_weight=torch.ones(16), k_weight=torch.ones(4)),
        pair(q_weight=torch.ones(4, 4), k_weight=torch.ones(8)),
        pair(q_weight=torch.ones(16), k_weight=torch.ones(8), spec=NormSpec(True, 1e-6)),
        pair(head_dim=4, heads=(2**11 + 1, 1), q_weight=torch.ones(2**13 + 4), k_weight=torch.ones(4)),
        pair(q_weight=None, k_weight=None),
        pair(k_weight=None),
        pair(q_weight=None),
        pair(spec=WEIGHTLESS),
        pair(cos=None),
        pair(sin=None),
        pair(q=torch.ones(2, 4, 3, 4).as_subclass(Tagged)),
        pair(sin=torch.ones(1, 3, 4).as_subclass(Tagged)),
        pair(k=torch.ones(2, 2, 3, 4).half()),
        pair(k_weight=torch.ones(4).half()),
        pair(sin=torch.ones(1, 3, 4).half()),
        pair(k=torch.ones(2, 2, 3, 4, device="meta")),
        pair(q_weight=torch.ones(4, device="meta"), k_weight=torch.ones(4, device="meta")),
        pair(cos=torch.ones(1, 3, 4).double(), sin=torch.ones(1, 3, 4).double()),
        pair(dtype=torch.bfloat16, spec=NormSpec(False, 1e-6, rounding="weight_dtype")),
        pair(q=torch.ones(4, 3, 4)),
        pair(k=torch.ones(1, 2, 2, 3, 4)),
        pair(k=torch.ones(1, 2, 3, 4)),
        pair(k=torch.ones(2, 2, 4, 4)),
        pair(k=torch.ones(2, 2, 3, 5)),
        pair(head_dim=0, cos=None, sin=None),
        pair(head_dim=MAX_HEAD_DIM + 2),
        pair(q=torch.ones(2, 4, 4, 3).transpose(2, 3)),
        pair(k=torch.ones(2, 2, 4, 3).transpose(2, 3)),
        pair(q_weight=torch.ones(3)),
        pair(k_weight=torch.ones(5)),
        pair(q_weight=torch.ones(8)[::2]),
        pair(k_weight=torch.ones(8)[::2]),
        pair(cos=torch.ones(3, 4), sin=torch.ones(3, 4)),
        pair(sin=torch.ones(2, 3, 4)),
        pair(sin=torch.ones(1, 3, 8)[..., :4]),
        pair(cos=torch.ones(1, 3, 8)[..., ::2], sin=torch.ones(1, 3, 8)[..., ::2]),
        pair(cos=torch.ones(1, 2, 4), sin=torch.ones(1, 2, 4)),
        pair(cos=torch.ones(3, 3, 4), sin=torch.ones(3, 3, 4)),
        pair(tables=6),
        pair(tables=3),
        pair(tables=0),
        pair(batch=1, q=torch.ones(1, 1, 1, 4).expand(1, 1, MAX_ROWS, 4), cos=None, sin=None,
             k=torch.ones(1, 1, 1, 4).expand(1, 1, MAX_ROWS, 4)),
    ],
)  # fmt: skip
def test_queries_and_keys_that_one_launch_does_not_take(operands):
    assert why_not_qk(*operands)
