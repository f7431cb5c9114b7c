"""Residual add + norm in one launch: bit for bit what the two do apart, and its
gradients against float64.
"""

import itertools

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
    DTYPES,
    LAYOUTS,
    SPECS,
    packed,
    parameters,
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


def strides(t):
    return [s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1]


def gradients(outputs, inputs, upstream):
    """Gradients of those outputs that have an upstream one."""
    used = [
        (y, dy.to(y.dtype))
        for y, dy in zip(outputs, upstream, strict=True)
        if dy is not None
    ]
    return torch.autograd.grad([y for y, _ in used], inputs, [dy for _, dy in used])


def check(spec, x, residual, weight, bias, dh, dy):
    """Outputs bit for bit against the add and the unfused kernel; everything against
    float64.
    """
    leaves = [
        None if t is None else t.detach().requires_grad_()
        for t in (x, residual, weight, bias)
    ]

    def run(function, tensors, upstream=(dh, dy)):
        outputs = function(*tensors, spec)
        inputs = [t for t in tensors if t is not None]
        return [*(t.detach() for t in outputs), *gradients(outputs, inputs, upstream)]

    def run_shuffled(seed):
        order = torch.randperm(
            x.shape[:-1].numel(), generator=torch.Generator().manual_seed(seed)
        ).to(x.device)
        new = [
            None if t is None else t.detach().flatten(0, -2)[order]
            for t in (x, residual, dh, dy)
        ]
        return run(
            eager, [*(t.requires_grad_() for t in new[:2]), *leaves[2:]], new[2:]
        )

    before = [None if t is None else t.clone() for t in (dh, dy)]
    with use_backend("triton"):
        fused = run(fused_add_norm, leaves)
        apart = fused_norm(residual + x, weight, bias, spec)
    for t, copy in zip((dh, dy), before, strict=True):
        assert t is None or torch.equal(t, copy), (
            "the incoming gradient was overwritten"
        )
    assert torch.equal(fused[0], residual + x)
    # A GPU sums unaligned rows in other tiles, where the sum of them, a new tensor,
    # would be aligned.
    if (
        INTERPRETED
        or x.shape[-1] % 8
        or not any(t.data_ptr() % 16 for t in (x, residual))
    ):
        assert torch.equal(fused[1], apart)
    expected = run(eager, leaves)
    assert [strides(t) for t in fused[:2]] == [strides(t) for t in expected[:2]]
    exact = run(
        eager,
        [None if t is None else t.detach().double().requires_grad_() for t in leaves],
    )
    shuffled = [run_shuffled(seed) for seed in range(4)] if weight is not None else []
    names = [
        "h",
        "y",
        "dx",
        "dresidual",
        *(n for n, t in (("dweight", weight), ("dbias", bias)) if t is not None),
    ]
    for i, name in enumerate(names):
        orders = [s[i] for s in shuffled] if name in ("dweight", "dbias") else []
        assert_as_accurate(fused[i], expected[i], exact[i], name, orders)
    shared = (
        (fused[2], fused[3].to(x.dtype))
        if x.dtype != torch.float32
        else (fused[2].to(residual.dtype), fused[3])
    )
    assert torch.equal(*shared), "x and residual share one gradient"


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


@pytest.mark.parametrize(
    "hidden_size",
    [1, 7, 128, 1000, 1024, 2560, *(pytest.param(n, marks=pytest.mark.full) for n in (4096, 8192, 14336, 16384)),
     9216, pytest.param(12288, marks=pytest.mark.full)],
)  # fmt: skip
@pytest.mark.parametrize("name", ["llama", "layer_norm", "layer_norm_no_bias"])
def test_every_width(name, hidden_size):
    weight, bias = parameters(SPECS[name], hidden_size, torch.bfloat16)
    x, residual, dh, dy = operands((3, hidden_size), torch.bfloat16)
    check(SPECS[name], x, residual, weight, bias, dh, dy)


@pytest.mark.parametrize("name", ["llama", "t5", "gemma", "fp32_weight"])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float16])
def test_a_weight_of_another_dtype(name, weight_dtype):
    weight, bias = parameters(SPECS[name], 64, weight_dtype)
    x, residual, dh, dy = operands((4, 64), torch.bfloat16)
    check(SPECS[name], x, residual, weight, bias, dh, dy)


MIXED = [
    # autocast: a linear's output, the residual stream, the weight
    (torch.bfloat16, torch.float32, torch.float32),
    (torch.float16, torch.float32, torch.float32),
    (torch.float32, torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.float32, torch.bfloat16),
    (torch.float32, torch.float16, torch.float16),
]


def mixtures():
    for name, dtypes in itertools.product(PLAIN, MIXED):
        if not SPECS[name].functional or dtypes[2] == torch.float32:
            # torch's own norms take one dtype
            yield name, dtypes, 96
    yield from (
        ("llama", MIXED[0], 14336),
        ("llama", MIXED[1], 14336),
        ("layer_norm", MIXED[0], 14336),
    )


@pytest.mark.parametrize(("name", "dtypes", "hidden_size"), mixtures(), ids=str)
def test_x_residual_and_weight_of_other_dtypes(name, dtypes, hidden_size):
    of_x, of_residual, of_weight = dtypes
    weight, bias = parameters(SPECS[name], hidden_size, of_weight)
    x, residual, dh, dy = operands((3, hidden_size), torch.float32)
    x, residual = x.to(of_x), residual.to(of_residual)
    check(SPECS[name], x, residual, weight, bias, dh, dy)
    check(SPECS[name], x, residual, weight, bias, None, dy)


def contiguous(shape, dtype, seed):
    return rows(*shape, dtype=dtype, seed=seed)


@pytest.mark.parametrize("x_layout", [contiguous, *LAYOUTS])
@pytest.mark.parametrize("residual_layout", [contiguous, *LAYOUTS])
@pytest.mark.parametrize("name", ["llama", "layer_norm"])
def test_strided_operands(name, x_layout, residual_layout):
    """h and y come in the order that PyTorch's addition gives these operands."""
    shape, dtype = (2, 3, 4, 64), torch.bfloat16
    weight, bias = parameters(SPECS[name], 64, dtype)
    x, residual = x_layout(shape, dtype, 0), residual_layout(shape, dtype, 3)
    _, _, dh, dy = operands(shape, dtype)
    check(SPECS[name], x, residual, weight, bias, dh, dy)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_out_of_range_and_half_way_round_as_the_addition_does(dtype):
    """Ties to even, overflow to infinity, NaN, signed zeros and subnormal sums."""
    tiny, one, most = (
        torch.finfo(dtype).tiny,
        1 + torch.finfo(dtype).eps,
        torch.finfo(dtype).max,
    )
    values = torch.tensor([0.0, -0.0, tiny, tiny / 2, 1.0, one, -one, 2.0**-9, 2.0**-12, most, -most, torch.inf,
                           -torch.inf, torch.nan, 3.0, 257.0], dtype=torch.float64).to(DEVICE, dtype)  # fmt: skip
    x, residual = (
        t.reshape(-1, 16) for t in torch.meshgrid(values, values, indexing="ij")
    )
    with torch.no_grad(), use_backend("triton"):
        h, _ = fused_add_norm(x, residual.contiguous(), None, None, SPECS["no_weight"])
    torch.testing.assert_close(h, residual + x, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(h.signbit() & ~h.isnan(), (residual + x).signbit() & ~h.isnan())


@pytest.mark.parametrize("layout", [contiguous, packed, transposed, unaligned])
def test_addressable_operands_are_read_in_place(layout):
    dispatched = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            dispatched.append(str(func))
            return func(*args, **(kwargs or {}))

    x, residual = (
        layout((2, 3, 4, 64), torch.bfloat16, 0),
        layout((2, 3, 4, 64), torch.bfloat16, 3),
    )
    weight, _ = parameters(SPECS["llama"], 64, torch.bfloat16)
    with torch.no_grad(), use_backend("triton"), Record(), count_launches() as launches:
        fused_add_norm(x, residual, weight, None, SPECS["llama"])
    assert launches == {"norm_forward": 1}
    made = [op for op in dispatched if "permute" not in op]
    assert len(made) == 2 and all(op.startswith("aten.empty") for op in made)


def test_no_zeros_are_made_for_an_output_that_nobody_used():
    """A graph whose h goes nowhere costs neither a tensor of zeros nor the addition of
    it.
    """
    x, residual, _, dy = operands((4, 64), torch.bfloat16)
    dispatched = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            dispatched.append(str(func))
            return func(*args, **(kwargs or {}))

    with use_backend("triton"):
        _, y = fused_add_norm(
            x.requires_grad_(), residual, None, None, SPECS["no_weight"]
        )
        with Record():
            torch.autograd.grad(y, x, dy)
    assert [op for op in dispatched if "empty" not in op and "detach" not in op] == []


@pytest.mark.parametrize("name", ["llama", "layer_norm"])
def test_bytes_kept_for_the_backward(name):
    """h, which the residual stream keeps anyway, parameters, 4 bytes a row and
    statistic; not x, not residual.
    """
    weight, bias = parameters(SPECS[name], 64, torch.bfloat16)
    x, residual, _, _ = operands((10, 64), torch.bfloat16)
    kept = []

    def pack(t):
        kept.append(t)
        return t

    with (
        use_backend("triton"),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
    ):
        h, _ = fused_add_norm(
            x.requires_grad_(), residual.requires_grad_(), weight, bias, SPECS[name]
        )
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept
    }
    known = {t.untyped_storage().data_ptr() for t in (x, residual)}
    assert h.untyped_storage().data_ptr() in storages and not known & set(storages)
    own = sum(storages.values()) - sum(
        p.untyped_storage().nbytes() for p in (weight, bias) if p is not None
    )
    assert own == 10 * 64 * 2 + 10 * 4 * (2 if SPECS[name].centered else 1)


def test_one_tensor_may_be_both_operands():
    x, _, dh, dy = operands((4, 64), torch.float32)
    weight, _ = parameters(SPECS["llama"], 64, torch.float32)
    x.requires_grad_()
    with use_backend("triton"):
        outputs = fused_add_norm(x, x, weight, None, SPECS["llama"])
        (dx,) = torch.autograd.grad(outputs, x, [dh, dy])
    expected = torch.autograd.grad(
        eager(x, x, weight, None, SPECS["llama"]), x, [dh, dy]
    )
    torch.testing.assert_close(dx, *expected)


def test_leaves_that_share_a_gradient_do_not_share_its_memory():
    x, residual, _, dy = operands((4, 64), torch.float32)
    x.requires_grad_(), residual.requires_grad_()
    with use_backend("triton"):
        h, y = fused_add_norm(x, residual, None, None, SPECS["no_weight"])
        (y * dy + h).sum().backward()
    assert torch.equal(x.grad, residual.grad)
    assert x.grad.data_ptr() != residual.grad.data_ptr()


def test_what_is_not_served_is_added_and_normalised_apart():
    x, residual, _, _ = operands((2, 3, 64), torch.bfloat16)
    weight = torch.ones(64, dtype=torch.bfloat16, device=DEVICE)
    for other in (residual.float(), residual[:, :1]):
        with use_backend("triton"), count_launches() as launches:
            h, y = fused_add_norm(x, other, weight, None, SPECS["llama"])
            assert torch.equal(y, fused_norm(other + x, weight, None, SPECS["llama"]))
        assert torch.equal(h, other + x)
        assert launches == {"norm_forward": 2}


def test_a_functional_norm_under_a_devices_autocast(monkeypatch):
    monkeypatch.setattr("hf_rmsnorm.ops.norm._autocast_anywhere", lambda: True)
    monkeypatch.setattr("hf_rmsnorm.ops.norm.autocasts_functional", lambda *of: True)
    spec = NormSpec(True, 1e-5, has_bias=True, functional=True)
    x, residual, _, _ = operands((3, 64), torch.float32)
    half = (
        torch.rand(64, device=DEVICE).bfloat16(),
        torch.rand(64, device=DEVICE).bfloat16(),
    )
    with use_backend("triton"), torch.no_grad():
        expected = fused_add_norm(x, residual, *(t.float() for t in half), spec)
        for a, b in zip(
            fused_add_norm(x, residual, *half, spec), expected, strict=True
        ):
            assert torch.equal(a, b)


@pytest.mark.parametrize("at", range(4))
def test_the_operand_alone_that_asks_for_a_gradient(at):
    spec = NormSpec(True, 1e-5, has_bias=True)
    x, residual, dh, dy = operands((3, 64), torch.float32)
    leaves = [
        x,
        residual,
        torch.rand(64, device=DEVICE) + 0.5,
        torch.rand(64, device=DEVICE),
    ]
    leaves[at] = leaves[at].detach().requires_grad_()

    def gradient(h, y):
        return torch.autograd.grad((h * dh).sum() + (y * dy).sum(), leaves[at])[0]

    with use_backend("triton"):
        found = gradient(*fused_add_norm(*leaves, spec))
        with torch.no_grad():
            assert not any(t.requires_grad for t in fused_add_norm(*leaves, spec))
    h = leaves[1] + leaves[0]
    torch.testing.assert_close(
        found, gradient(h, reference_norm(h, *leaves[2:], spec)), rtol=1e-4, atol=1e-4
    )


def test_a_sum_in_half_precision_is_not_a_functional_norms_under_autocast(monkeypatch):
    spec, weight = NormSpec(True, 1e-5, functional=True), torch.ones(64, device=DEVICE)
    monkeypatch.setattr("hf_rmsnorm.ops.norm._autocast_anywhere", lambda: True)
    monkeypatch.setattr("hf_rmsnorm.ops.norm.autocasts_functional", lambda *of: True)
    x, residual, _, _ = operands((2, 3, 64), torch.bfloat16)
    with use_backend("triton"), torch.no_grad():
        for left, dtype in ((x, torch.bfloat16), (x.float(), torch.float32)):
            h, y = fused_add_norm(left, residual, weight, None, spec)
            assert (h.dtype, y.dtype) == (dtype, torch.float32)
