"""What expressions compute: the bytes that they have given from the first, and equal ones from pieces of any size.

A plan that does not fit a checkpoint is one line with what, where and the cure, and nothing is written.
"""

import hashlib
import warnings

import pytest
import torch
from checkpoints import assert_refused, numbers, tiny, write_checkpoint

from hf_rmsnorm.conversion.checkpoint import expressions
from hf_rmsnorm.conversion.checkpoint.expressions import (
    Centred,
    Filled,
    FoldedBias,
    Plus,
    Rows,
    Scaled,
    Stored,
    Transposed,
    computed,
    rounded,
)
from hf_rmsnorm.conversion.checkpoint.values import Values
from hf_rmsnorm.conversion.plan import Centre, CentringPlan, Copy, Scale

GOLDEN = {
    "centred": "447e7c9d6161820a",
    "scaled": "46284426a7a623f4",
    "rows": "70b6733b8625c81f",
    "transposed": "721670a37aef95e7",
    "folded": "184899ef1e26809d",
    "folded alone": "d55008723e23c51c",
    "filled": "9be5114ade68d30e",
}


@pytest.mark.parametrize("piece", [1, 30, 1 << 17])
def test_the_tensors_of_expressions(piece, monkeypatch):
    monkeypatch.setattr(expressions, "PIECE", piece)
    tensors = {
        "w": numbers(12, 20, seed=1, dtype=torch.bfloat16),
        "v": numbers(20, seed=2, dtype=torch.bfloat16),
        "b": numbers(12, seed=3, dtype=torch.bfloat16),
    }
    w, v, b = (Stored(name) for name in "wvb")
    made = computed(
        {
            "centred": Centred(w, 0),
            "scaled": Scaled(Centred(w, 0), Plus(v, 1.0), 1),
            "rows": Rows(w, torch.tensor([3, 1, 2, 11, 0])),
            "transposed": Transposed(Centred(w, 1, 10, (1,))),
            "folded": FoldedBias(w, v, b),
            "folded alone": FoldedBias(Transposed(Transposed(w)), v),
            "filled": Filled(w, 1.0, 1),
        },
        Values(tensors),
    )
    digests = {
        name: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
        for name, tensor in made.items()
    }
    assert digests == GOLDEN


@pytest.fixture
def src(tmp_path):
    return write_checkpoint(tmp_path / "src", tiny()[0])


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (CentringPlan(centre=(Centre("nowhere", 0, 12),)), ["nowhere", "plan"]),
        (CentringPlan(copy=(Copy("head", "nowhere"),)), ["nowhere", "plan"]),
        (CentringPlan(scale=(Scale("nowhere", 0, "h.0.scale"),)), ["nowhere", "plan"]),
        (CentringPlan(scale=(Scale("h.0.out.weight", 0, "nowhere"),)), ["nowhere", "plan"]),
        (CentringPlan(scale=(Scale("h.0.out.weight", 1, "h.0.scale"),)), ["h.0.scale", "[12]", "24"]),
        (CentringPlan(scale=(Scale("h.0.out.weight", 2, "h.0.scale"),)), ["[12, 24]", "no axis 2"]),
        (CentringPlan(centre=(Centre("wte.weight", 2, 12),)), ["[20, 12]", "no axis 2"]),
        (CentringPlan(centre=(Centre("wte.weight", -1, 12),)), ["no axis -1"]),
        (CentringPlan(centre=(Centre("wte.weight", 1, 5),)), ["wte.weight", "12 elements", "blocks of 5"]),
        (CentringPlan(centre=(Centre("wte.weight", 1, 0),)), ["blocks of 0"]),
        (CentringPlan(centre=(Centre("wte.weight", 1, 6, (1, 2)),)), ["blocks of 6", "1 2"]),
        (CentringPlan(centre=(Centre("wte.weight", 1, 6, (-1,)),)), ["blocks of 6", "-1"]),
        (CentringPlan(copy=(Copy("h.0.out.bias", "h.0.scale"),)), ["h.0.out.bias", "differs", "h.0.scale"]),
        (CentringPlan(copy=(Copy("wte.weight", "h.0.scale"),)), ["wte.weight", "differs", "h.0.scale"]),
    ],
    ids=str,
)  # fmt: skip
def test_plans_that_do_not_fit(src, plan, words):
    assert_refused(plan, src, *words, "plan")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_quantised_tensors_that_write_to_the_stream(tmp_path, dtype):
    src = write_checkpoint(tmp_path / "src", [{"w": torch.ones(4, 4).to(dtype), "by": torch.ones(4).to(dtype)}])
    ways_out = ("quantised", "convert the unquantised model", "then quantise")
    assert_refused(CentringPlan(centre=(Centre("w", 0, 4),)), src, "w is", *ways_out)
    assert_refused(CentringPlan(scale=(Scale("w", 0, "by"),)), src, "by is", *ways_out)


def test_what_float16_cannot_hold_is_infinite_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rounded(torch.tensor([1e6, 1.0], dtype=torch.float64), torch.float16).isinf().tolist() == [True, False]
