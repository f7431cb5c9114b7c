"""What only real hardware can show of one norm: rounding, alignment, streams, graphs,
compilation, 64-bit addresses.

How to run these: tests/helpers/gpu.py.
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
from tolerance import assert_as_accurate, ulp

from hf_rmsnorm import patch_model, use_backend
from tests.unit.kernels.test_norm_forward import assert_equal, check
from tests.unit.kernels.test_qk_forward import Attention, assert_strides, check_backward

pytestmark = gpu_tests
parametrize = pytest.mark.parametrize

DTYPES = {  # of x and of the weight
    "bfloat16": (BF16, BF16),
    "float16": (FP16, FP16),
    "float32": (FP32, FP32),
    "bfloat16-float32": (BF16, FP32),
    "float32-bfloat16": (FP32, BF16),
}
ONE_DTYPE = "layer_norm", "l2"  # torch's takes one, and l2 has no weight
SIZES = [2, 96]
CENTERED_SIZES = [2, 96]
HEAD_DIMS = [64]
ROWS = 5
if GPU:
    SIZES += [896, 1000, 4096, 8192, 14336, 16384]
    CENTERED_SIZES += [1000, 4096, 8192, 12288, 16384]
    HEAD_DIMS += [128, 256]
    ROWS = 301


def judge(norm, x, dy):
    """The kernels of its formula against float64, allowed what plain torch gets wrong on
    the same input.
    """
    _, spec = fuse(norm)
    parameters = dict(norm.named_parameters())
    check(spec, x, parameters.get("weight"), parameters.get("bias"), dy)


def rows_and_gradient(rows, size, dtype=BF16):
    x = random(rows, size, dtype=dtype)
    dy = random(rows, size, dtype=dtype, seed=1)
    return x, dy


@parametrize("dtypes", DTYPES)
@parametrize("name", MODULES)
def test_formula_in_dtype(name, dtypes):
    x_dtype, weight_dtype = DTYPES[dtypes]
    if x_dtype != weight_dtype and name in ONE_DTYPE:
        pytest.skip("it takes one dtype")
    size = 64
    if GPU:
        size = 1024
    norm = make(name, size, weight_dtype)
    x, dy = rows_and_gradient(ROWS, size, x_dtype)
    judge(norm, x, dy)


NORMS = [("llama", size) for size in SIZES]
NORMS += [("layer_norm", size) for size in CENTERED_SIZES]


@parametrize(("name", "hidden_size"), NORMS)
def test_hidden_size(name, hidden_size):
    norm = make(name, hidden_size, BF16)
    rows = min(ROWS, 2**22 // hidden_size)
    rows = max(rows, 3)
    x, dy = rows_and_gradient(rows, hidden_size)
    judge(norm, x, dy)


def row_major():
    return random(2, 24, 4, 128)


def slice_of_a_packed_projection():
    packed = random(2, 24, 12 * 128)
    middle = packed[..., 4 * 128 : 8 * 128]
    return middle.unflatten(-1, (4, 128))


def heads_before_rows():
    values = random(2, 4, 24, 128)
    return values.transpose(1, 2)


def misaligned_base():
    values = random(2 * 24 * 4 * 128 + 1)
    return values[1:].view(2, 24, 4, 128)


def last_stride_2():
    values = random(2, 24, 4, 256)
    return values[..., ::2]


def one_row_repeated():
    row = random(1, 1, 1, 128)
    return row.expand(2, 24, 4, 128)


LAYOUTS = [
    row_major,
    slice_of_a_packed_projection,
    heads_before_rows,
    misaligned_base,
    last_stride_2,
    one_row_repeated,
]


@parametrize("layout", LAYOUTS)
@parametrize("operand", ["x", "dy"])
def test_layout(operand, layout):
    norm = make("llama", 128, BF16)
    laid_out = layout()
    other = random(2, 24, 4, 128, seed=2)
    if operand == "dy":
        judge(norm, other, laid_out)
    else:
        judge(norm, laid_out, other)


@parametrize("dtype", [BF16, FP16])
@parametrize("hidden_size", [128, pytest.param(4096, marks=real_gpu)])
def test_half_precision_is_bit_equal_to_llama_rmsnorm(hidden_size, dtype):
    rows = 16
    if GPU:
        rows = 4096
    norm = make("llama", hidden_size, dtype)
    fused, _ = fuse(norm)
    x = random(rows, hidden_size, dtype=dtype)
    same = fused(x) == norm(x)
    share = same.double().mean().item()
    assert share >= 0.999, f"{share:.5%} of the elements are bit-equal"


REPEATED = [("llama", 128), ("llama", 16384), ("layer_norm", 4096)]


@parametrize(("name", "hidden_size"), REPEATED)
def test_gradients_are_the_same_bits_every_time(name, hidden_size):
    rows = 3000
    times = 10
    if not GPU:
        hidden_size = 64
        rows = 8
        times = 2
    norm = make(name, hidden_size, BF16)
    fused, _ = fuse(norm)
    x, dy = rows_and_gradient(rows, hidden_size)
    first = run(fused, x, dy)
    for _ in range(times):
        again = run(fused, x, dy)
        assert_equal(first, again)


@real_gpu
@parametrize("stride", [4096, 8 * 4096], ids=["row major", "wide rows"])
def test_offsets_beyond_two_to_the_31(stride):
    free, _ = torch.cuda.mem_get_info()
    if free < 20e9:  # x, y, dy and dx of 4 GiB each
        pytest.skip("needs 20 GB of free GPU memory")
    hidden_size = 4096
    tail = 8
    rows = 2**31 // stride + tail
    norm, _ = fuse(make("llama", hidden_size, BF16))
    wide = torch.empty(rows, stride, dtype=BF16, device=DEVICE)
    x = wide.normal_()[:, :hidden_size]
    dy = torch.zeros(rows, hidden_size, dtype=BF16, device=DEVICE)
    dy[-tail:] = random(tail, hidden_size)
    y, dx, dweight = run(norm, x, dy)
    # Only the last rows, all of whose offsets are past 2^31, have a gradient: alone
    # they must give the same.
    alone = run(norm, x[-tail:].contiguous(), dy[-tail:].clone())
    assert_equal([y[-tail:], dx[-tail:]], alone[:2])
    assert not dx[:-tail].any()
    error = (dweight.double() - alone[2].double()).abs().max()
    assert error <= ulp(alone[2].abs().max(), BF16)


@real_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_launches_on_the_device_of_its_tensors():
    fused, _ = fuse(make("llama", 512, BF16))
    x, dy = rows_and_gradient(64, 512)
    expected = run(fused, x, dy)
    other = copy.deepcopy(fused).to("cuda:1")
    other_x = x.to("cuda:1")
    other_dy = dy.to("cuda:1")
    for _ in range(2):  # the first call compiles, the second takes the cached launch
        got = run_fused(other, other_x, other_dy)
        assert torch.cuda.current_device() == 0
        for tensor, right in zip(got, expected, strict=True):
            assert tensor.get_device() == 1
            assert torch.equal(tensor.to("cuda:0"), right)


@real_gpu
def test_runs_on_the_current_stream():
    fused, _ = fuse(make("llama", 4096, BF16))
    source = random(256, 4096)
    x = torch.zeros(256, 4096, dtype=BF16, device=DEVICE)
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
@parametrize("memory_efficient", [False, True])
@parametrize("name", ["llama", "layer_norm"])
def test_cuda_graph_capture(name, memory_efficient):
    fused, _ = fuse(make(name, 4096, BF16))
    patch_model(fused, memory_efficient=memory_efficient)
    x, dy = rows_and_gradient(64, 4096)
    x.requires_grad_()
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
    fresh = random(64, 4096, seed=5)
    x.data.copy_(fresh)
    graph.replay()
    torch.cuda.synchronize()
    expected = run(fused, fresh, dy)
    assert_equal([y, *grads], expected)


@real_gpu
def test_fifty_shapes_compile_nothing_new(monkeypatch):
    from triton import knobs

    fused, _ = fuse(make("llama", 128, BF16))
    compiled = []

    def forward_and_backward(batch, length, heads):
        flat = random(batch * length, 128)
        packed = random(batch, length, heads + 2, 128)
        for x in (flat, packed[:, :, :heads]):
            dy = random(*x.shape, seed=1)
            run(fused, x, dy)
            with torch.no_grad():
                fused(x)

    def note(**call):
        compiled.append(call["repr"])

    forward_and_backward(2, 5, 4)
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", note)
    for i in range(50):
        batch = 1 + i % 3
        length = 1 + 17 * i
        heads = 1 + i % 5
        forward_and_backward(batch, length, heads)
    assert not compiled


HEADS = "projected", "packed", "contiguous"


def heads_of(layout, heads, length, head_dim, seed):
    """(batch, heads, length, head_dim), as a projection gives them."""
    if layout == "contiguous":
        return random(2, heads, length, head_dim, seed=seed)
    width = heads
    if layout == "packed":
        width = 3 * heads
    rows = random(2, length, width, head_dim, seed=seed)
    return rows[:, :, :heads].transpose(1, 2)


@parametrize("head_dim", HEAD_DIMS)
@parametrize("layout", HEADS)
def test_queries_and_keys_in_one_launch(layout, head_dim):
    heads = 8
    length = 6
    if GPU:
        heads = 32
        length = 1000
    q = heads_of(layout, heads, length, head_dim, 0)
    k = heads_of(layout, heads // 4, length, head_dim, 1)
    weights = [random(head_dim, seed=2), random(head_dim, seed=3)]
    half = random(2, length, head_dim // 2, dtype=FP32, seed=4)
    angles = half.repeat(1, 1, 2)
    tables = angles.cos().to(BF16), angles.sin().to(BF16)
    made = Attention(q, k, weights, tables)
    with use_backend("triton"):
        fused = made.forward()
    with use_backend("reference"):
        eager = made.forward()
        exact = made.doubled().forward()
    assert_strides(fused, eager)
    for y, of_eager, right in zip(fused, eager, exact, strict=True):
        assert_as_accurate(y, of_eager, right)
    check_backward(made, [random(*x.shape, seed=5) for x in (q, k)])
