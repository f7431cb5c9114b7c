"""What Triton's interpreter converts as hardware does, and that nothing of it is left
behind.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="there is no interpreter without Triton")

import triton.language as tl
import triton.runtime.interpreter as interpreter

from hf_rmsnorm.kernels.interpreter import faithful_interpreter

VALUES = torch.tensor(
    [
        1.0,
        1.00390625,
        1.01171875,
        -1.00390626,
        3e38,
        1e-40,
        -0.0,
        torch.inf,
        -torch.inf,
        torch.nan,
    ]
)


def converted(values, source, target):
    with np.errstate(all="ignore"):
        return interpreter._convert_float(values, source, target, None)


def test_float32_is_rounded_to_nearest_even():
    with faithful_interpreter():
        bits = converted(VALUES.numpy(), tl.float32, tl.bfloat16)
    assert bits[-1] == 0x7FC0  # NaN, as a GPU writes it
    rounded = torch.from_numpy(bits.view(np.int16).copy())
    rounded = rounded.view(torch.bfloat16)
    torch.testing.assert_close(
        rounded, VALUES.to(torch.bfloat16), rtol=0, atol=0, equal_nan=True
    )


def test_every_bfloat16_is_kept():
    halves = np.arange(2**16, dtype=np.uint32)
    halves = halves.astype(np.uint16)
    with faithful_interpreter():
        wide = converted(halves, tl.bfloat16, tl.float32)
    assert np.array_equal(wide.view(np.uint32), halves.astype(np.uint32) << 16)


@pytest.mark.parametrize(
    "source, target",
    [(tl.float32, tl.float16), (tl.float16, tl.float32), (tl.float32, tl.float8e5)],
)
def test_other_conversions_are_tritons(source, target):
    values = VALUES.numpy()[:4]
    if source == tl.float16:
        values = values.astype(np.float16)
    expected = converted(values, source, target)
    with faithful_interpreter():
        result = converted(values, source, target)
    assert np.array_equal(result, expected)


def test_rows_of_a_tile_are_added_in_pairs():
    """As threads add them: one after another 4,096 values of 0.1 lose three digits
    more.
    """
    tile = interpreter.TensorHandle(np.full((4096, 2), 0.1, np.float32), tl.float32)
    tile = tl.core.tensor(tile, tl.block_type(tl.float32, [4096, 2]))
    with faithful_interpreter():
        reduction = interpreter.ReduceOps(0, tl.standard._sum_combine, False)
        total = reduction.sum(tile)
    exact = 4096 * float(np.float32(0.1))
    error = np.abs(total.handle.data - exact)
    assert error.max() < exact * 2**-23


def replaced_functions():
    return [
        interpreter._convert_float,
        interpreter._patch_lang,
        interpreter.ReduceOps.sum,
    ]


def test_the_interpreter_is_put_back_after_an_error():
    before = replaced_functions()
    with pytest.raises(ZeroDivisionError), faithful_interpreter():
        assert replaced_functions() != before
        1 / 0  # noqa: B018
    assert replaced_functions() == before


@pytest.mark.skipif(
    not hasattr(interpreter, "_LangPatchScope"),
    reason="this Triton's interpreter changes its language for good",
)
def test_an_array_of_one_element_is_a_number():
    """Which Triton 3.6 leaves to NumPy, and NumPy 2.4 refuses; afterwards it is
    Triton's again.
    """
    kernel = SimpleNamespace(__globals__={"tl": tl})
    one = SimpleNamespace(handle=SimpleNamespace(data=np.array([3])))
    before = tl.tensor.__dict__.get("__index__")
    with faithful_interpreter():
        scope = interpreter._patch_lang(kernel)
        assert tl.tensor.__index__(one) == 3
        scope.restore()
    assert tl.tensor.__dict__.get("__index__") is before
