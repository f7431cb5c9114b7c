"""Residual add + norm in one launch: bit for bit what the two do apart, and its
gradients against float64.
"""

import pytest
import torch
from add_norm import fused_add_norm
from tolerance import assert_as_accurate
from torch.utils._python_dispatch import TorchDispatchMode

from hf_rmsnorm import NormSpec, count_launches, use_backend
from hf_rmsnorm.kernels.compiled import INTERPRETED
from hf_rmsnorm.ops import fused_norm
from hf_rmsnorm.reference import reference_norm
from tests.unit.kernels.test_kernels import (
    BF16,
    DTYPES,
    FP16,
    FP32,
    LAYOUTS,
    SPECS,
    contiguous,
    doubled,
    packed,
    parameters,
    real_strides,
    rows,
    transposed,
    unaligned,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLAIN = [
    name
    for name, spec in SPECS.items()
    if spec.gate is None and spec.group_size is None
]


def eager(x, residual, weight, bias, spec):
    h = residual + x
    return h, reference_norm(h, weight, bias, spec)


NAMES = "x", "residual", "weight", "bias"


def run(function, spec, tensors, upstream):
    """The outputs h and y, and the gradients of tensors, by name."""
    leaves = {}
    for name, t in zip(NAMES, tensors, strict=True):
        leaves[name] = None if t is None else t.detach().requires_grad_()
    outputs = function(*leaves.values(), spec)
    pairs = []
    for y, dy in zip(outputs, upstream, strict=True):
        if dy is not None:
            pairs.append((y, dy.to(y.dtype)))
    asked = {name: t for name, t in leaves.items() if t is not None}
    ys, dys = zip(*pairs, strict=True)
    gradients = torch.autograd.grad(ys, list(asked.values()), dys)
    h, y = outputs
    results = {"h": h.detach(), "y": y.detach()}
    results.update(zip(asked, gradients, strict=True))
    return results


def in_another_order(t, seed):
    """The rows of t, shuffled."""
    if t is None:
        return None
    rows = t.flatten(0, -2)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(rows), generator=generator)
    return rows[order.to(t.device)]


def check_bits(fused, spec, x, residual, weight, bias):
    total = residual + x
    assert torch.equal(fused["h"], total)
    # A GPU sums unaligned rows in other tiles, where the sum of them, a new tensor,
    # would be aligned.
    are_aligned = x.data_ptr() % 16 == 0 and residual.data_ptr() % 16 == 0
    if INTERPRETED or x.shape[-1] % 8 or are_aligned:
        with use_backend("triton"):
            apart = fused_norm(total, weight, bias, spec)
        assert torch.equal(fused["y"], apart)


def check(spec, x, residual, weight, bias, dh, dy):
    """Outputs bit for bit against the add and the unfused kernel; everything against
    float64.
    """
    tensors = (x, residual, weight, bias)
    upstream = (dh, dy)
    before = dy.clone()
    with use_backend("triton"):
        fused = run(fused_add_norm, spec, tensors, upstream)
    assert torch.equal(dy, before), "the incoming gradient was overwritten"
    check_bits(fused, spec, *tensors)
    expected = run(eager, spec, tensors, upstream)
    exact = run(eager, spec, doubled(*tensors), upstream)
    orders = [shuffled(spec, tensors, upstream, seed) for seed in range(4)]
    for name, result in fused.items():
        others = []
        if name in ("weight", "bias"):
            others = [order[name] for order in orders]
        assert_as_accurate(result, expected[name], exact[name], name, others)
    for name in ("h", "y"):
        assert real_strides(fused[name]) == real_strides(expected[name])
    dx = fused["x"]
    dresidual = fused["residual"]
    narrow = x.dtype
    if narrow == FP32:
        narrow = residual.dtype
    same = torch.equal(dx.to(narrow), dresidual.to(narrow))
    assert same, "x and residual share one gradient"


def shuffled(spec, tensors, upstream, seed):
    x, residual, *parameters = tensors
    rows = [in_another_order(t, seed) for t in (x, residual, *upstream)]
    return run(eager, spec, (*rows[:2], *parameters), rows[2:])


def operands(shape, dtype):
    """x, residual, dh, dy."""
    return [rows(*shape, dtype=dtype, seed=seed) for seed in (0, 3, 5, 7)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PLAIN)
def test_every_formula_in_every_dtype(name, dtype):
    weight, bias = parameters(SPECS[name], 96, dtype)
    x, residual, dh, dy = operands((3, 5, 96), dtype)
    check(SPECS[name], x, residual, weight, bias, dh, dy)
    check(SPECS[name], x, residual, weight, bias, None, dy)


WIDTHS = [1, 7, 128, 1000, 1024, 2560, 9216]
for width in (4096, 8192, 12288, 14336, 16384):
    WIDTHS.append(pytest.param(width, marks=pytest.mark.full))


@pytest.mark.parametrize("hidden_size", WIDTHS)
@pytest.mark.parametrize("name", ["llama", "layer_norm", "layer_norm_no_bias"])
def test_every_width(name, hidden_size):
    weight, bias = parameters(SPECS[name], hidden_size, BF16)
    x, residual, dh, dy = operands((3, hidden_size), BF16)
    check(SPECS[name], x, residual, weight, bias, dh, dy)


MIXED = [
    # autocast: a linear's output, the residual stream, the weight
    (BF16, FP32, FP32),
    (FP16, FP32, FP32),
    (FP32, BF16, FP32),
    (BF16, FP32, BF16),
    (FP32, FP16, FP16),
    (BF16, BF16, FP32),
]


def mixtures():
    for name in PLAIN:
        for dtypes in MIXED:
            if not SPECS[name].functional or dtypes[2] == FP32:
                # torch's own norms take one dtype
                yield name, dtypes, 96
    yield "llama", MIXED[0], 14336
    yield "layer_norm", MIXED[0], 14336


@pytest.mark.parametrize(("name", "dtypes", "hidden_size"), mixtures(), ids=str)
def test_x_residual_and_weight_of_other_dtypes(name, dtypes, hidden_size):
    of_x, of_residual, of_weight = dtypes
    weight, bias = parameters(SPECS[name], hidden_size, of_weight)
    x, residual, dh, dy = operands((3, hidden_size), FP32)
    x = x.to(of_x)
    residual = residual.to(of_residual)
    check(SPECS[name], x, residual, weight, bias, dh, dy)
    check(SPECS[name], x, residual, weight, bias, None, dy)


@pytest.mark.parametrize("x_layout", [contiguous, *LAYOUTS])
@pytest.mark.parametrize("residual_layout", [contiguous, *LAYOUTS])
@pytest.mark.parametrize("name", ["llama", "layer_norm"])
def test_strided_operands(name, x_layout, residual_layout):
    """h and y come in the order that PyTorch's addition gives these operands."""
    shape = (2, 3, 4, 64)
    weight, bias = parameters(SPECS[name], 64, BF16)
    x = x_layout(shape, BF16, 0)
    residual = residual_layout(shape, BF16, 3)
    _, _, dh, dy = operands(shape, BF16)
    check(SPECS[name], x, residual, weight, bias, dh, dy)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_sums_out_of_range_and_half_way_round_as_the_addition_does(dtype):
    """Ties to even, overflow to infinity, NaN, signed zeros and subnormal sums."""
    tiny = torch.finfo(dtype).tiny
    one = 1 + torch.finfo(dtype).eps
    most = torch.finfo(dtype).max
    values = [0.0, tiny, tiny / 2, 1.0, one, 2.0**-9, 2.0**-12, most, torch.inf]
    values += [-value for value in (0.0, one, most, torch.inf)]
    values += [torch.nan, 3.0, 257.0]
    values = torch.tensor(values, dtype=torch.float64)
    values = values.to(DEVICE, dtype)
    x, residual = torch.meshgrid(values, values, indexing="ij")
    x = x.contiguous()
    residual = residual.contiguous()
    with torch.no_grad(), use_backend("triton"):
        h, _ = fused_add_norm(x, residual, None, None, SPECS["no_weight"])
    total = residual + x
    torch.testing.assert_close(h, total, rtol=0, atol=0, equal_nan=True)
    is_number = ~h.isnan()
    assert torch.equal(h.signbit() & is_number, total.signbit() & is_number)


class Record(TorchDispatchMode):
    """The names of the operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("layout", [contiguous, packed, transposed, unaligned])
def test_addressable_operands_are_read_in_place(layout):
    x = layout((2, 3, 4, 64), BF16, 0)
    residual = layout((2, 3, 4, 64), BF16, 3)
    weight, _ = parameters(SPECS["llama"], 64, BF16)
    with (
        torch.no_grad(),
        use_backend("triton"),
        count_launches() as launches,
        Record() as record,
    ):
        fused_add_norm(x, residual, weight, None, SPECS["llama"])
    assert launches == {"norm_forward": 1}
    made = [name for name in record.names if "permute" not in name]
    assert [name.startswith("aten.empty") for name in made] == [True, True]


def test_no_zeros_are_made_for_an_output_that_is_not_used():
    """A graph whose h goes nowhere costs neither a tensor of zeros nor the addition of
    it.
    """
    x, residual, _, dy = operands((4, 64), BF16)
    x.requires_grad_()
    with use_backend("triton"):
        _, y = fused_add_norm(x, residual, None, None, SPECS["no_weight"])
        with Record() as record:
            torch.autograd.grad(y, x, dy)
    for name in record.names:
        assert "empty" in name or "detach" in name


@pytest.mark.parametrize("name", ["llama", "layer_norm"])
def test_bytes_kept_for_the_backward(name):
    """h, which the residual stream keeps anyway, parameters, 4 bytes a row and
    statistic; not x, not residual.
    """
    spec = SPECS[name]
    rows = 10
    weight, bias = parameters(spec, 64, BF16)
    x, residual, _, _ = operands((rows, 64), BF16)
    x.requires_grad_()
    kept = {}

    def pack(t):
        storage = t.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return t

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
    with use_backend("triton"), hooks:
        h, _ = fused_add_norm(x, residual, weight, bias, spec)
    assert h.data_ptr() in kept
    assert x.data_ptr() not in kept
    assert residual.data_ptr() not in kept
    for parameter in (weight, bias):
        if parameter is not None:
            del kept[parameter.untyped_storage().data_ptr()]
    statistics = 1
    if spec.centered:
        statistics = 2
    assert sum(kept.values()) == rows * (64 * 2 + 4 * statistics)


def test_leaves_that_share_a_gradient_do_not_share_its_memory():
    x, residual, _, dy = operands((4, 64), FP32)
    x.requires_grad_(), residual.requires_grad_()
    with use_backend("triton"):
        h, y = fused_add_norm(x, residual, None, None, SPECS["no_weight"])
        (y * dy + h).sum().backward()
    assert torch.equal(x.grad, residual.grad)
    assert x.grad.data_ptr() != residual.grad.data_ptr()


def test_what_is_not_served_is_added_and_normalised_apart():
    x, residual, _, _ = operands((2, 3, 64), BF16)
    weight = torch.ones(64, dtype=BF16, device=DEVICE)
    for other in (residual.float(), residual[:, :1]):
        with use_backend("triton"), count_launches() as launches:
            h, y = fused_add_norm(x, other, weight, None, SPECS["llama"])
            assert torch.equal(y, fused_norm(other + x, weight, None, SPECS["llama"]))
        assert torch.equal(h, other + x)
        assert launches == {"norm_forward": 2}


def test_a_sum_in_half_precision_is_not_a_functional_norms_under_autocast(monkeypatch):
    monkeypatch.setattr("hf_rmsnorm.ops.norm._autocast_anywhere", lambda: True)
    monkeypatch.setattr("hf_rmsnorm.ops.norm.autocasts_functional", lambda *of: True)
    spec = NormSpec(True, 1e-5, functional=True)
    weight = torch.ones(64, device=DEVICE).bfloat16()
    x, residual, _, _ = operands((2, 3, 64), BF16)
    for left in (x, x.float()):
        with use_backend("triton"), torch.no_grad():
            h, y = fused_add_norm(left, residual, weight, None, spec)
        assert h.dtype == left.dtype
        assert y.dtype == FP32
