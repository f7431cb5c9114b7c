"""What no kernel computes is refused in words, never computed as something else."""

import pytest
import torch

from hf_rmsnorm import NormSpec
from hf_rmsnorm.kernels.sizes import MAX_HEAD_DIM, MAX_HIDDEN_SIZE, forward_config
from hf_rmsnorm.operands import of_norm, of_sum
from hf_rmsnorm.ops.backend import device_refusal
from hf_rmsnorm.ops.limits import MAX_HEADS, MAX_ROWS, serves_qk, why_not

D = 8
RMS = NormSpec(False, 1e-6, rounding="before_weight")
BIASED = NormSpec(False, 1e-6, has_bias=True)
W = torch.ones(D)


def of(rows, columns=D):
    """So many rows, in the memory of one."""
    return torch.ones(1, columns).expand(rows, columns)


GATED = NormSpec(False, 1e-6, gate="silu_after")
WEIGHTLESS = NormSpec(False, 1e-6, has_weight=False)
TOO_WIDE = of(1, MAX_HIDDEN_SIZE + 1)
OTHER_ROWS = f"rows, not 1 to {MAX_ROWS}"


@pytest.mark.parametrize(
    "said, x, weight, bias, spec, gate",
    [
        ("x is torch.float64", of(2).double(), W, None, RMS, None),
        (
            "shape (), is not between 1 and",
            torch.ones(()),
            None,
            None,
            WEIGHTLESS,
            None,
        ),
        ("is not between 1 and", TOO_WIDE, TOO_WIDE[0], None, RMS, None),
        ("has a gate and the call has none", of(2), W, None, GATED, None),
        ("or the other way round", of(2), W, None, RMS, of(2)),
        ("weight is torch.float64", of(2), W.double(), None, RMS, None),
        ("bias is torch.int64", of(2), W, W.long(), BIASED, None),
        ("weight has shape (7,), and x (2, 8)", of(2), W[:7], None, RMS, None),
        ("weight has shape (2, 8), and x", of(3)[None], of(2), None, RMS, None),
        ("weight has shape (8, 3), and x", of(2), of(D, 3), None, RMS, None),
        ("parameters of ", torch.ones(1, 0, D), of(0), None, RMS, None),
        ("parameters of ", of(MAX_HEADS + 1)[None], of(MAX_HEADS + 1), None, RMS, None),
        ("weight and bias differ in shape", of(2)[None], of(2), W, BIASED, None),
        ("weight has gaps", of(2), torch.ones(D, 2)[:, 0], None, RMS, None),
        ("weight is on meta and x on cpu", of(2), W.to("meta"), None, RMS, None),
        ("bias is on meta and x on cpu", of(2), W, W.to("meta"), BIASED, None),
        ("gate is torch.float64", of(2), W, None, GATED, of(2).double()),
        ("gate has shape (1, 8), and x", of(2), W, None, GATED, of(1)),
        ("gate is on meta and x", of(2), W, None, GATED, of(2).to("meta")),
        (OTHER_ROWS, of(MAX_ROWS + 1), W, None, RMS, None),
    ],
)
def test_what_no_kernel_serves_is_refused_in_words(said, x, weight, bias, spec, gate):
    assert said in why_not(spec, of_norm(x, weight, bias, gate))


@pytest.mark.parametrize(
    "x, weight, bias, spec, gate",
    [
        (of(MAX_ROWS), W, None, RMS, None),
        (of(MAX_ROWS)[:, None], of(1), None, RMS, None),
        (of(MAX_HEADS)[None], *[of(MAX_HEADS).contiguous()] * 2, BIASED, None),
        (of(2, MAX_HIDDEN_SIZE), of(1, MAX_HIDDEN_SIZE)[0], None, RMS, None),
        (of(2, MAX_HIDDEN_SIZE)[None], torch.ones(2, MAX_HIDDEN_SIZE), None, RMS, None),
        (of(2, 1), torch.ones(1), None, RMS, None),
        (of(2), W, None, GATED, of(2).half()),
        (of(2).half(), W.bfloat16(), None, RMS, None),
    ],
)
@pytest.mark.skipif(
    device_refusal("cpu") is not None, reason="needs TRITON_INTERPRET=1"
)
def test_the_largest_and_the_smallest_are_served(x, weight, bias, spec, gate):
    assert why_not(spec, of_norm(x, weight, bias, gate)) == ""


def test_row_numbers_stay_below_32_bits_in_the_last_tile():
    """Whatever the width: a tile may reach past the last row, and heads multiply what
    it reaches past.
    """
    most = max(forward_config(n).rows for n in range(1, MAX_HIDDEN_SIZE + 1))
    assert MAX_ROWS + most < 2**31
    assert 2 * MAX_ROWS + most * MAX_HEADS < 2**32


SUMS = [
    ("residual is torch.float64", of(2), of(2).double(), W, RMS),
    ("residual has shape (1, 8), and x", of(2), of(1), W, RMS),
    ("residual is on meta and x", of(2), of(2).to("meta"), W, RMS),
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
    ("which the kernels do not compute", of(2), of(2), W, GATED),
]


@pytest.mark.parametrize("said, x, residual, weight, spec", SUMS)
def test_what_no_kernel_adds_is_refused_in_words(said, x, residual, weight, spec):
    assert said in why_not(spec, of_sum(residual, x, weight, None))


def pair(
    q=(2, 4, 3, 4), k=(2, 2, 3, 4), weight=(4,), table=(1, 3, 4), spec=RMS, given=()
):
    """Operands that one launch takes, of these shapes, but for tensors that are `given`."""
    operands = {
        "q": torch.ones(q),
        "k": torch.ones(k),
        "q_weight": torch.ones(weight),
        "k_weight": torch.ones(weight),
        "cos": torch.ones(table),
        "sin": torch.ones(table),
    }
    operands.update(given)
    return spec, tuple(operands.values())


NONE = {"q_weight": None, "k_weight": None}
WIDEST = (1, 1, 3, MAX_HEAD_DIM)
MANY = {
    "q": of(MAX_ROWS // 2, 4)[None, None],
    "k": of(MAX_ROWS // 2, 4)[None, None],
    "cos": of(MAX_ROWS // 2, 4)[None],
    "sin": of(MAX_ROWS // 2, 4)[None],
}


@pytest.mark.parametrize(
    "operands",
    [
        pair(),
        pair(spec=WEIGHTLESS, given=NONE),
        pair(q=WIDEST, k=WIDEST, weight=(MAX_HEAD_DIM,)),
        pair(k=(2, 0, 3, 4), table=(2, 3, 2)),
        pair(spec=NormSpec(False, 1e-6), given=MANY),
    ],
)
@pytest.mark.skipif(
    device_refusal("cpu") is not None, reason="needs TRITON_INTERPRET=1"
)
def test_queries_and_keys_that_one_launch_takes(operands):
    assert serves_qk(*operands)


WIDE_HEADS = (1, 1, 3, MAX_HEAD_DIM + 2)
TABLE = torch.ones(1, 3, 4)
REFUSED = {
    "centred": pair(spec=NormSpec(True, 1e-6)),
    "a bias": pair(spec=BIASED),
    "no weights": pair(given=NONE),
    "one weight": pair(given={"k_weight": None}),
    "weights that the formula has not": pair(spec=WEIGHTLESS),
    "two dtypes": pair(given={"k_weight": torch.ones(4).half()}),
    "a dtype": pair(given={"cos": TABLE.double(), "sin": TABLE.double()}),
    "two devices": pair(given={"k_weight": torch.ones(4, device="meta")}),
    "three dimensions": pair(q=(4, 3, 4)),
    "another batch": pair(k=(1, 2, 3, 4)),
    "another length": pair(k=(2, 2, 4, 4)),
    "another width": pair(k=(2, 2, 3, 5)),
    "wide heads": pair(q=WIDE_HEADS, k=WIDE_HEADS, weight=(MAX_HEAD_DIM + 2,)),
    "columns with gaps": pair(given={"q": torch.ones(2, 4, 4, 3).mT}),
    "a short weight": pair(given={"q_weight": torch.ones(3)}),
    "a weight of heads": pair(weight=(4, 4)),
    "a weight with gaps": pair(given={"k_weight": torch.ones(8)[::2]}),
    "tables of two layouts": pair(given={"sin": torch.ones(1, 3, 8)[..., :4]}),
    "tables of another length": pair(table=(1, 2, 4)),
    "tables of another batch": pair(table=(3, 3, 4)),
    "an odd number of columns": pair(table=(1, 3, 3)),
    "more columns than the heads": pair(table=(1, 3, 6)),
    "no columns": pair(table=(1, 3, 0)),
    "many rows": pair(given=MANY | {"q": of(MAX_ROWS, 4)[None, None]}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_queries_and_keys_that_one_launch_does_not_take(name):
    assert not serves_qk(*REFUSED[name])
