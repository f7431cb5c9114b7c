"""The Triton kernels against float64, run by Triton's interpreter where there is no
GPU.

Named for the regime each one exercises; the tolerance is the policy of
tests/helpers/tolerance.py throughout.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tolerance import assert_as_accurate

from hf_rmsnorm import NormSpec, count_launches, use_backend
from hf_rmsnorm.ops import fused_norm
from hf_rmsnorm.reference import reference_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (FP32, BF16, FP16)
SPECS = {
    "llama": NormSpec(False, 1e-6, rounding="before_weight"),
    "fp32_weight": NormSpec(False, 1e-5),
    "gemma": NormSpec(False, 1e-6, weight_offset=1.0),
    "t5": NormSpec(False, 1e-6, rounding="weight_dtype"),
    "no_weight": NormSpec(False, 1e-6, has_weight=False),
    "rms_bias": NormSpec(False, 1e-6, has_bias=True, rounding="before_weight"),
    "eps_zero": NormSpec(False, 0.0, rounding="before_weight"),
    "layer_norm": NormSpec(True, 1e-5, has_bias=True, functional=True),
    "layer_norm_no_bias": NormSpec(True, 1e-5),
    "layer_norm_no_affine": NormSpec(True, 1e-5, has_weight=False),
    "layer_norm_then_affine": NormSpec(
        True, 1e-5, has_bias=True, rounding="before_weight", functional=True
    ),
    "rounded_rstd": NormSpec(False, 1e-6, has_weight=False, rounding="rstd"),
    "rounded_rstd_weight": NormSpec(False, 1e-6, rounding="rstd"),
    "textbook": NormSpec(False, 1e-2, has_bias=True, eps_outside=True),
    "textbook_layer_norm": NormSpec(True, 1e-2, eps_outside=True),
    "rounded_offset": NormSpec(
        False, 1e-6, weight_offset=1.0, rounding="before_weight"
    ),
    "silu_before": NormSpec(False, 1e-6, rounding="before_weight", gate="silu_before"),
    "silu_after": NormSpec(False, 1e-6, rounding="before_weight", gate="silu_after"),
    "sigmoid_after": NormSpec(False, 1e-6, gate="sigmoid_after"),
    "gated_layer_norm": NormSpec(True, 1e-5, has_bias=True, gate="silu_after"),
    "grouped": NormSpec(False, 1e-6, weight_offset=1.0, group_size=24),
    "grouped_silu_before": NormSpec(
        False, 1e-6, rounding="before_weight", gate="silu_before", group_size=24
    ),
    "grouped_silu_after": NormSpec(False, 1e-6, gate="silu_after", group_size=32),
}


def parameters(spec, hidden_size, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mean = 1.0 - spec.weight_offset
    weight = torch.randn(hidden_size, generator=generator) * 0.3 + mean
    bias = torch.randn(hidden_size, generator=generator)
    weight = weight.to(DEVICE, dtype).requires_grad_()
    bias = bias.to(DEVICE, dtype).requires_grad_()
    if not spec.has_weight:
        weight = None
    if not spec.has_bias:
        bias = None
    return weight, bias


def rows(*shape, dtype, seed=0, mean=0.25):
    generator = torch.Generator().manual_seed(seed + 1)
    values = torch.randn(shape, generator=generator)
    values = values * 1.7 + mean
    return values.to(DEVICE, dtype)


def doubled(*tensors):
    return [t if t is None else t.detach().double() for t in tensors]


def run(function, spec, operands, dy):
    """The output, and the gradients of the operands that there are."""
    # x keeps its strides
    leaves = [t if t is None else t.detach().requires_grad_() for t in operands]
    x, weight, bias, gate = leaves
    y = function(x, weight, bias, spec, gate=gate)
    wanted = [t for t in leaves if t is not None]
    return [y.detach(), *torch.autograd.grad(y, wanted, dy.to(y.dtype))]


def shuffled(operands, dy, seed):
    """The operands and dy with their rows in another order; of a weight for each head,
    whole rows of heads.
    """
    x, weight, bias, gate = operands
    first = 0
    if weight is not None:
        first = weight.dim() - 1
    last = -2 - first
    x = x.detach().flatten(0, last)
    dy = dy.flatten(0, last)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=generator)
    order = order.to(x.device)
    if gate is not None:
        gate = gate.detach().flatten(0, last)[order]
    return (x[order], weight, bias, gate), dy[order]


def real_strides(t):
    """The strides, but for those of dimensions of one element, which may be anything."""
    return [s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1]


def check(spec, x, weight, bias, dy, gate=None):
    """Forward and backward of the kernels against float64, judged by plain-torch eager
    on the same input.
    """
    if gate is None and spec.gate is not None:
        gate = rows(*x.shape, dtype=x.dtype, seed=11)
    operands = x, weight, bias, gate
    before = dy.clone()
    with use_backend("triton"):
        fused = run(fused_norm, spec, operands, dy)
    assert torch.equal(before, dy), "the incoming gradient was overwritten"
    eager = run(reference_norm, spec, operands, dy)
    exact = run(reference_norm, spec, doubled(*operands), dy)
    orders = []
    for seed in range(4):
        orders.append(run(reference_norm, spec, *shuffled(operands, dy, seed)))
    names = ["y"]
    gradients = "dx", "dweight", "dbias", "dgate"
    for name, operand in zip(gradients, operands, strict=True):
        if operand is not None:
            names.append(name)
    assert len(fused) == len(names)
    for i, name in enumerate(names):
        others = []
        if name in ("dweight", "dbias"):
            others = [made[i] for made in orders]
        assert_as_accurate(fused[i], eager[i], exact[i], name, others)
    assert real_strides(fused[0]) == real_strides(eager[0])


def check_rows(name, shape, x_dtype, weight_dtype=None):
    """`check` of rows that lie one behind the other."""
    weight, bias = parameters(SPECS[name], shape[-1], weight_dtype or x_dtype)
    x = rows(*shape, dtype=x_dtype, seed=0)
    dy = rows(*shape, dtype=x_dtype, seed=7)
    check(SPECS[name], x, weight, bias, dy)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SPECS)
def test_every_formula_in_every_dtype(name, dtype):
    check_rows(name, (3, 5, 96), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "name",
    ["llama", "gemma", "layer_norm_no_bias", "layer_norm_then_affine", "silu_after"],
)
@pytest.mark.parametrize("shape", [(2, 5, 3, 24), (7, 2, 128), (1, 1, 70, 8)])
def test_every_head_has_a_weight_of_its_own(name, shape, dtype):
    spec = SPECS[name]
    weight, bias = parameters(spec, shape[-2] * shape[-1], dtype)
    weight = weight.detach().view(shape[-2:])
    if bias is not None:
        bias = bias.detach().view(shape[-2:])
    packed = rows(*shape[:-2], 2, *shape[-2:], dtype=dtype)
    check(spec, packed.select(-3, 1), weight, bias, rows(*shape, dtype=dtype, seed=7))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "name", ["silu_before", "silu_after", "sigmoid_after", "grouped_silu_before"]
)
def test_the_gate_is_read_where_it_lies(name, dtype):
    """x and gate are slices of one projection, and the gate may lie in another order
    than x.
    """
    spec = SPECS[name]
    weight, bias = parameters(spec, 96, dtype)
    dy = rows(2, 5, 96, dtype=dtype, seed=7)
    projected = rows(2, 5, 96 + 8 + 96, dtype=dtype)
    x = projected[..., :96]
    gate = projected[..., 104:]
    check(spec, x, weight, bias, dy, gate)
    turned = rows(5, 2, 96, dtype=FP32).transpose(0, 1)
    check(spec, x, weight, bias, dy, turned)
    check(spec, turned.to(dtype), weight, bias, dy, gate)


@pytest.mark.parametrize("hidden_size", [1024, 5120, 8192, 16384])
@pytest.mark.parametrize("name", ["silu_before", "sigmoid_after"])
def test_every_width_of_a_gated_row(name, hidden_size):
    check_rows(name, (3, hidden_size), BF16)


WIDTHS = [1, 7, 64, 128, 896, 1000, 1024, 2048, 2560, 4096]
WIDTHS += [pytest.param(n, marks=pytest.mark.full) for n in (5120, 8192, 14336)]
WIDTHS.append(16384)


@pytest.mark.parametrize("hidden_size", WIDTHS)
@pytest.mark.parametrize("name", ["llama", "layer_norm"])
def test_every_tile_width(name, hidden_size):
    # what a row of one leaves of dx is noise, here or eager's
    count = 64
    if hidden_size > 1:
        count = 3
    check_rows(name, (count, hidden_size), BF16)


@pytest.mark.full
@pytest.mark.parametrize("hidden_size", [1152, 2560, 5120, 9216])
@pytest.mark.parametrize(
    "name", ["llama", "rms_bias", "textbook", "layer_norm", "layer_norm_no_bias"]
)
def test_rows_much_shorter_than_their_tile(name, hidden_size):
    """What lies behind them is not computed; there are more rows than programs."""
    check_rows(name, (40, hidden_size), BF16)


@pytest.mark.parametrize(
    "name", ["llama", "fp32_weight", "gemma", "t5", "rms_bias", "layer_norm_no_bias"]
)
@pytest.mark.parametrize(
    ("x_dtype", "weight_dtype"),
    [
        (BF16, FP32),
        (FP32, BF16),
        (FP16, FP32),
        (FP16, BF16),
    ],
)
def test_mixed_dtypes(name, x_dtype, weight_dtype):
    check_rows(name, (4, 64), x_dtype, weight_dtype)


def packed(shape, dtype, seed):
    """A view of the first heads of a packed projection: gaps between the rows' groups."""
    *outer, heads, hidden_size = shape
    whole = rows(*outer, (heads + 4) * hidden_size, dtype=dtype, seed=seed)
    return whole[..., : heads * hidden_size].unflatten(-1, (heads, hidden_size))


def transposed(shape, dtype, seed):
    first, second, third, columns = shape
    whole = rows(first, third, second, columns, dtype=dtype, seed=seed)
    return whole.transpose(1, 2)


def last_dimension_strided(shape, dtype, seed):
    return rows(*shape[:-1], shape[-1] * 2, dtype=dtype, seed=seed)[..., ::2]


def unaligned(shape, dtype, seed):
    return rows(*shape[:-1], shape[-1] + 1, dtype=dtype, seed=seed)[..., 1:]


def contiguous(shape, dtype, seed):
    return rows(*shape, dtype=dtype, seed=seed)


def expanded(shape, dtype, seed):
    return rows(1, *shape[1:], dtype=dtype, seed=seed).expand(shape)


LAYOUTS = [packed, transposed, last_dimension_strided, unaligned, expanded]


@pytest.mark.parametrize("x_layout", LAYOUTS)
@pytest.mark.parametrize("dy_layout", [packed, transposed])
@pytest.mark.parametrize("name", ["llama", "layer_norm"])
def test_strided_rows_and_gradients(name, x_layout, dy_layout):
    shape = (2, 3, 4, 64)
    weight, bias = parameters(SPECS[name], 64, BF16)
    x = x_layout(shape, BF16, 0)
    dy = dy_layout(shape, BF16, 7)
    check(SPECS[name], x, weight, bias, dy)


@pytest.mark.parametrize("layout", [packed, transposed, unaligned])
def test_addressable_views_are_read_in_place(layout):
    """No operator but the allocation of the output: a copy of x would show."""
    x = layout((2, 3, 4, 64), BF16, 0)
    weight, _ = parameters(SPECS["llama"], 64, BF16)
    dispatched = set()

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            dispatched.add(str(func))
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), use_backend("triton"), Record(), count_launches() as launches:
        fused_norm(x, weight, None, SPECS["llama"])
    assert launches == {"norm_forward": 1}
    assert dispatched - {"aten.permute.default"} == {"aten.empty_like.default"}


@pytest.mark.nightly  # 4.3 GB of address space, and the interpreter touches it all
def test_offsets_beyond_32_bits():
    hidden_size = 64
    stride = 2**31 + 64
    storage = torch.zeros(stride + hidden_size, dtype=BF16, device=DEVICE)
    x = storage.as_strided((2, hidden_size), (stride, 1))
    x.copy_(rows(2, hidden_size, dtype=BF16))
    weight, bias = parameters(SPECS["llama"], hidden_size, BF16)
    dy = rows(2, hidden_size, dtype=BF16, seed=7)
    check(SPECS["llama"], x, weight, bias, dy)


@pytest.mark.parametrize("name", ["llama", "layer_norm"])
def test_no_rows_need_no_kernel(name):
    weight, bias = parameters(SPECS[name], 64, FP32)
    x = torch.empty((2, 0, 64), device=DEVICE, requires_grad=True)
    with count_launches() as launches:
        y = fused_norm(x, weight, bias, SPECS[name])
        dx, dweight = torch.autograd.grad(y.sum(), (x, weight))
    assert y.shape == dx.shape == x.shape
    assert not dweight.any()
    assert not launches


def test_weight_gradient_is_deterministic_and_skipped_when_frozen():
    spec = SPECS["llama"]
    weight, _ = parameters(spec, 128, BF16)
    x = rows(50, 128, dtype=BF16).requires_grad_()
    dy = rows(50, 128, dtype=BF16, seed=7)

    def gradients(weight, *wanted):
        return torch.autograd.grad(fused_norm(x, weight, None, spec), wanted, dy)

    with use_backend("triton"):
        first = gradients(weight, x, weight)
        again = gradients(weight, x, weight)
        assert all(map(torch.equal, first, again))
        with count_launches() as launches:
            (dx,) = gradients(weight.detach(), x)
    assert torch.equal(dx, first[0])
    # a frozen weight has no gradient to reduce
    assert launches == {"norm_forward": 1, "norm_backward": 1}


def test_many_rows_sum_in_float32():
    """A bfloat16 running sum over 4,000 rows would lose most of them."""
    x = torch.ones(4000, 8, dtype=BF16, device=DEVICE)
    weight = torch.ones(8, dtype=BF16, device=DEVICE, requires_grad=True)
    with use_backend("triton"):
        y = fused_norm(x, weight, None, SPECS["llama"])
        (dw,) = torch.autograd.grad(y, weight, torch.ones_like(x))
    assert torch.equal(dw, torch.full_like(dw, 4000.0))


@pytest.mark.parametrize("name", ["llama", "layer_norm"])
def test_nan_inf_and_zero_rows_stay_in_their_row(name):
    weight, bias = parameters(SPECS[name], 64, FP32)
    x = rows(6, 64, dtype=FP32)
    x[1, 3] = torch.nan
    x[2, 5] = torch.inf
    x[4] = 0.0
    with torch.no_grad(), use_backend("triton"):
        y = fused_norm(x, weight, bias, SPECS[name])
    expected = reference_norm(x, weight, bias, SPECS[name])
    expected = expected.detach()
    assert torch.equal(y.isnan(), expected.isnan())
    torch.testing.assert_close(y, expected, equal_nan=True)


@pytest.mark.parametrize("centered", [False, True])
@settings(
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
    max_examples=settings().max_examples // 2,
)
@given(
    data=st.data(),
    # From 8: with two or three columns a gradient is hardly more than the rounding of a
    # cancellation.
    hidden_size=st.one_of(st.integers(8, 300), st.sampled_from([512, 1024, 3000])),
    outer=st.integers(1, 3),
    inner=st.integers(1, 4),
    layout=st.sampled_from([contiguous, *LAYOUTS]),
    x_dtype=st.sampled_from(DTYPES),
    weight_dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**16),
)
def test_any_shape_stride_dtype_and_formula(
    centered, data, hidden_size, outer, inner, layout, x_dtype, weight_dtype, seed
):
    names = [name for name, spec in SPECS.items() if spec.centered == centered]
    spec = SPECS[data.draw(st.sampled_from(names))]
    if spec.functional and x_dtype != weight_dtype:
        # F.layer_norm refuses the mixture, so there is no eager to compare with
        weight_dtype = x_dtype
    # A group is always a handful, and a gate makes it less; with its eps outside the
    # root a norm multiplies by the reciprocal where eager divides, one float32 rounding
    # more, which the tests by formula above allow for.
    if spec.gate is not None or spec.group_size is not None or spec.eps_outside:
        if x_dtype == FP32:
            x_dtype = BF16
        if weight_dtype == FP32:
            weight_dtype = BF16
    if FP32 in (x_dtype, weight_dtype):
        # In float32 both errors are a few roundings: over a handful of elements their
        # ratio is luck.
        hidden_size = max(hidden_size, 64)
    if spec.group_size is not None:
        hidden_size = -(-hidden_size // spec.group_size) * spec.group_size
    weight, bias = parameters(spec, hidden_size, weight_dtype, seed)
    shape = (2, outer, inner, hidden_size)
    x = layout(shape, x_dtype, seed)
    check(spec, x, weight, bias, rows(*shape, dtype=x_dtype, seed=seed + 7))


@pytest.mark.parametrize("hidden_size", [96, 1000, 16384])
@pytest.mark.parametrize("value", [100.0, 1000.3])
def test_constant_rows_of_layer_norm_are_exactly_zero(hidden_size, value):
    spec = SPECS["layer_norm_no_affine"]
    x = torch.full((2, hidden_size), value, device=DEVICE)
    with use_backend("triton"):
        assert not fused_norm(x, None, None, spec).any()


@pytest.mark.parametrize("hidden_size", [1000, 14336])
def test_layer_norm_of_rows_far_from_zero(hidden_size):
    """A mean 10,000 times the deviation: its own rounding must not reach the result."""
    x = 100 + 0.01 * rows(3, hidden_size, dtype=FP32, mean=0)
    x = x.contiguous()
    dy = rows(3, hidden_size, dtype=FP32, seed=7)
    check(SPECS["layer_norm_no_affine"], x, None, None, dy)
