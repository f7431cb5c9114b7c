"""What only real hardware can show of one norm: rounding, alignment, streams, graphs,
compilation, 64-bit addresses.

How to run these: tests/gpu.py.
"""

import copy

import pytest
import torch
from gpu import (
    BF16,
    DEVICE,
    FP16,
    FP32,
    GPU,
    MODULES,
    fuse,
    gpu_tests,
    make,
    random,
    real_gpu,
    run,
    run_fused,
)
from heads import fused_qk_norm
from tolerance import assert_as_accurate, ulp

from hf_rmsnorm import NormSpec, count_launches, patch_model, use_backend
from hf_rmsnorm.reference import reference_norm

pytestmark = gpu_tests

DTYPES = [
    (BF16, BF16),
    (FP16, FP16),
    (FP32, FP32),
    (BF16, FP32),
    (FP16, FP32),
    (FP32, BF16),
]
SIZES = (1, 96, 128, 896, 1000, 4096, 5120, 8192, 14336, 16384) if GPU else (1, 96)
CENTERED_SIZES = (2, 96, 1000, 4096, 8192, 12288, 14336, 16384) if GPU else (2, 96)
ROWS = 301 if GPU else 5


def judge(norm, x, dy):
    """A patched copy against float64, allowed what the module itself gets wrong on the
    same input.
    """
    fused, spec = fuse(norm)
    doubles = [t.detach().double().requires_grad_() for t in (x, *norm.parameters())]
    weight, bias = (*doubles[1:], None, None)[:2]
    y = reference_norm(doubles[0], weight, bias, spec)
    exact = [y.detach(), *torch.autograd.grad(y, doubles, dy.double())]
    got, eager = run_fused(fused, x, dy), run(norm, x, dy)
    assert_all_as_accurate(("y", "dx", "dweight", "dbias"), got, eager, exact)
    assert got[0].stride() == eager[0].stride()


def assert_all_as_accurate(names, got, eager, exact):
    for what, *tensors in zip(names, got, eager, exact, strict=False):
        assert_as_accurate(*tensors, what)


@pytest.mark.parametrize(
    "dtypes", DTYPES, ids=lambda d: "-".join(str(t).removeprefix("torch.") for t in d)
)
@pytest.mark.parametrize("name", MODULES)
def test_formula_in_dtype(name, dtypes):
    x_dtype, weight_dtype = dtypes
    if x_dtype != weight_dtype and name in ("layer_norm", "l2"):
        pytest.skip("torch's layer_norm takes one dtype, and l2 has no weight")
    size = 1024 if GPU else 64
    x, dy = (random(ROWS, size, dtype=x_dtype, seed=seed) for seed in (0, 1))
    judge(make(name, size, weight_dtype), x, dy)


@pytest.mark.parametrize(
    "name, hidden_size",
    [*(("llama", n) for n in SIZES), *(("layer_norm", n) for n in CENTERED_SIZES)],
)
def test_hidden_size(name, hidden_size):
    rows = max(3, min(ROWS, 2**22 // hidden_size))
    x, dy = random(rows, hidden_size), random(rows, hidden_size, seed=1)
    judge(make(name, hidden_size, BF16), x, dy)


LAYOUTS = {  # (2, 24, 4, 128) each
    "row major": lambda: random(2, 24, 4, 128),
    "slice of a packed projection": lambda: random(2, 24, 12 * 128)[
        ..., 4 * 128 : 8 * 128
    ].unflatten(-1, (4, 128)),
    "heads before rows": lambda: random(2, 4, 24, 128).transpose(1, 2),
    "odd row stride": lambda: random(2, 24, 4, 129)[..., :128],
    "misaligned base": lambda: random(2 * 24 * 4 * 128 + 1)[1:].view(2, 24, 4, 128),
    "last stride 2": lambda: random(2, 24, 4, 256)[..., ::2],
    "one row repeated": lambda: random(1, 1, 1, 128).expand(2, 24, 4, 128),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("operand", ["x", "dy"])
def test_layout(operand, layout):
    strided, plain = LAYOUTS[layout](), random(2, 24, 4, 128, seed=2)
    x, dy = (strided, plain) if operand == "x" else (plain, strided)
    judge(make("llama", 128, BF16), x, dy)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("hidden_size", [128, 4096] if GPU else [128])
def test_half_precision_is_bit_equal_to_llama_rmsnorm(hidden_size, dtype):
    norm = make("llama", hidden_size, dtype)
    x = random(4096 if GPU else 16, hidden_size, dtype=dtype)
    equal = (fuse(norm)[0](x) == norm(x)).double().mean().item()
    assert equal >= 0.999, f"{equal:.5%} of the elements are bit-equal"


@pytest.mark.parametrize(
    "name, hidden_size", [("llama", 128), ("llama", 16384), ("layer_norm", 4096)]
)
def test_gradients_are_the_same_bits_every_time(name, hidden_size):
    hidden_size = hidden_size if GPU else 64
    rows = 3000 if GPU else 8
    fused, _ = fuse(make(name, hidden_size, BF16))
    x, dy = random(rows, hidden_size), random(rows, hidden_size, seed=1)
    first = run(fused, x, dy)
    for _ in range(10 if GPU else 2):
        for a, b in zip(first, run(fused, x, dy), strict=True):
            assert torch.equal(a, b)


@real_gpu
@pytest.mark.parametrize("stride", [4096, 8 * 4096], ids=["row major", "wide rows"])
def test_offsets_beyond_two_to_the_31(stride):
    hidden_size, tail = 4096, 8
    rows = 2**31 // stride + tail
    if torch.cuda.mem_get_info()[0] < 20e9:  # x, y, dy and dx of 4 GiB each
        pytest.skip("needs 20 GB of free GPU memory")
    norm, _ = fuse(make("llama", hidden_size, BF16))
    x = torch.empty(rows, stride, dtype=BF16, device=DEVICE).normal_()[:, :hidden_size]
    dy = torch.zeros(rows, hidden_size, dtype=BF16, device=DEVICE)
    dy[-tail:] = random(tail, hidden_size)
    y, dx, dweight = run(norm, x, dy)
    # Only the last rows, all of whose offsets are past 2^31, have a gradient: alone
    # they must give the same.
    alone = run(norm, x[-tail:].contiguous(), dy[-tail:].clone())
    assert torch.equal(y[-tail:], alone[0])
    assert torch.equal(dx[-tail:], alone[1]) and not dx[:-tail].any()
    error = (dweight.double() - alone[2].double()).abs().max()
    assert error <= ulp(alone[2].abs().max(), BF16)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@real_gpu
def test_launches_on_the_device_of_its_tensors():
    fused, _ = fuse(make("llama", 512, BF16))
    x, dy = random(64, 512), random(64, 512, seed=1)
    expected = run(fused, x, dy)
    other = copy.deepcopy(fused).to("cuda:1")
    for _ in range(2):  # the first call compiles, the second takes the cached launch
        got = run_fused(other, x.to("cuda:1"), dy.to("cuda:1"))
        assert torch.cuda.current_device() == 0
        for a, b in zip(expected, got, strict=True):
            assert b.device == torch.device("cuda:1")
            assert torch.equal(a, b.to("cuda:0"))


@real_gpu
def test_runs_on_the_current_stream():
    fused, _ = fuse(make("llama", 4096, BF16))
    source, x = random(256, 4096), torch.zeros(256, 4096, dtype=BF16, device=DEVICE)
    expected = fused(source)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        # keeps this stream busy: a launch on another one would read zeros
        torch.cuda._sleep(100_000_000)
        x.copy_(source)
        y = fused(x)
    torch.cuda.synchronize()
    assert torch.equal(y, expected)


@real_gpu
@pytest.mark.parametrize("memory_efficient", [False, True])
@pytest.mark.parametrize("name, hidden_size", [("llama", 4096), ("layer_norm", 16384)])
def test_cuda_graph_capture(name, hidden_size, memory_efficient):
    fused, _ = fuse(make(name, hidden_size, BF16))
    patch_model(fused, memory_efficient=memory_efficient)
    x, dy = random(64, hidden_size).requires_grad_(), random(64, hidden_size, seed=1)
    leaves = [x, *fused.parameters()]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.autograd.grad(fused(x), leaves, dy)  # compiles, which a capture must not
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            y = fused(x)
            grads = torch.autograd.grad(y, leaves, dy)
    torch.cuda.current_stream().wait_stream(stream)
    fresh = random(64, hidden_size, seed=5)
    with torch.no_grad():
        x.copy_(fresh)
    graph.replay()
    torch.cuda.synchronize()
    for captured, eager in zip([y, *grads], run(fused, fresh, dy), strict=True):
        assert torch.equal(captured, eager)


@real_gpu
def test_the_allocator_sees_no_more_than_the_output_and_rstd():
    fused, _ = fuse(make("llama", 4096, BF16))
    x = random(8192, 4096).requires_grad_()
    fused(x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = fused(x)
    assert torch.cuda.max_memory_allocated() - before <= y.numel() * 2 + 8192 * 4 + 1024


@real_gpu
def test_fifty_shapes_compile_nothing_new(monkeypatch):
    from triton import knobs

    fused, _ = fuse(make("llama", 128, BF16))
    compiled = []

    def forward_and_backward(batch, length, heads):
        packed = random(batch, length, heads + 2, 128)
        for x in (random(batch * length, 128), packed[:, :, :heads]):
            run(fused, x, random(*x.shape, seed=1))
            with torch.no_grad():
                fused(x)

    def note(**call):
        compiled.append(call["repr"])

    forward_and_backward(2, 5, 4)
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", note)
    for i in range(50):
        forward_and_backward(1 + i % 3, 1 + 17 * i, 1 + i % 5)
    assert not compiled


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_checkpoint_recomputes_under_the_same_backend(backend, use_reentrant):
    # On a GPU autograd recomputes in a thread of its own, which sees no `use_backend`
    # of the caller.
    fused, _ = fuse(make("llama", 256, BF16))
    x, dy = random(8, 256), random(8, 256, seed=1)
    expected = run(fused, x, dy)
    x = x.requires_grad_()
    with use_backend(backend), count_launches() as launches:
        y = torch.utils.checkpoint.checkpoint(fused, x, use_reentrant=use_reentrant)
        y.backward(dy)
    assert launches["norm_forward"] == 2
    for a, b in zip(expected, [y.detach(), x.grad, fused.weight.grad], strict=True):
        assert torch.equal(a, b)


LLAMA = NormSpec(False, 1e-6, rounding="before_weight")
HEADS = {  # (batch, heads, length, head_dim) each, as a projection gives them
    "projected": lambda b, h, n, d, seed: random(b, n, h, d, seed=seed).transpose(1, 2),
    "packed": lambda b, h, n, d, seed: random(b, n, 3 * h, d, seed=seed)[
        :, :, :h
    ].transpose(1, 2),
    "contiguous": lambda b, h, n, d, seed: random(b, h, n, d, seed=seed),
}


def norm_of_heads(backend, operands, tables, dys):
    """Both outputs, and the gradients of q, k and their weights."""
    leaves = [t.detach().requires_grad_() for t in operands]
    with use_backend(backend):
        outputs = fused_qk_norm(*leaves, LLAMA, *tables)
        gradients = torch.autograd.grad(outputs, leaves, dys)
    return [*outputs, *gradients]


@pytest.mark.parametrize("head_dim", [64, 128, 256] if GPU else [64])
@pytest.mark.parametrize("layout", HEADS)
def test_queries_and_keys_in_one_launch(layout, head_dim):
    heads, length = (32, 1000) if GPU else (8, 6)
    q = HEADS[layout](2, heads, length, head_dim, seed=0)
    k = HEADS[layout](2, heads // 4, length, head_dim, seed=1)
    operands = [q, k, random(head_dim, seed=2), random(head_dim, seed=3)]
    angles = random(2, length, head_dim // 2, dtype=FP32, seed=4).repeat(1, 1, 2)
    tables = [angles.cos().to(BF16), angles.sin().to(BF16)]
    dys = [random(*q.shape, seed=5), random(*k.shape, seed=6)]
    with count_launches() as launches:
        fused = norm_of_heads("triton", operands, tables, dys)
    assert launches["qk_norm_forward"] == launches["qk_norm_backward"] == 1
    eager = norm_of_heads("reference", operands, tables, dys)
    doubles = [[t.double() for t in tensors] for tensors in (operands, tables, dys)]
    exact = norm_of_heads("reference", *doubles)
    names = ("yq", "yk", "dq", "dk", "dwq", "dwk")
    assert_all_as_accurate(names, fused, eager, exact)
    assert [y.stride() for y in fused[:2]] == [y.stride() for y in eager[:2]]
