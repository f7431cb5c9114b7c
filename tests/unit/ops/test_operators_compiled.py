"""Norms, alone, behind a sum and of queries and keys, under compilers, export and
tracing: torch sees one operator for each.
"""

import shutil

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from hf_rmsnorm import NormSpec, count_launches, use_backend
from hf_rmsnorm.ops import compute_norm
from tests.unit.ops.modules import (
    BACKENDS,
    DEVICE,
    MODULES,
    Norms,
    assert_equal,
    assert_near,
    leaves_of,
    outcome,
    random,
)


@pytest.fixture(autouse=True)
def nothing_is_compiled_yet():
    torch._dynamo.reset()


COMPILED = [
    ("triton", True),
    pytest.param("triton", False, marks=pytest.mark.full),
    pytest.param("reference", True, marks=pytest.mark.full),
    pytest.param("reference", False, marks=pytest.mark.full),
]


@pytest.mark.parametrize("backend, dynamic", COMPILED)
def test_compile_without_graph_breaks(module, backend, dynamic):
    """Compiled for dynamic sizes, it serves other batches and lengths."""
    compiled = torch.compile(
        module, fullgraph=True, dynamic=dynamic, backend="aot_eager"
    )
    no_recompile = torch._dynamo.config.patch(error_on_recompile=dynamic)
    with use_backend(backend), count_launches() as launches, no_recompile:
        for batch, length in ((2, 5), (3, 7)):
            inputs = module.inputs(batch, length)
            got = outcome(compiled, module, inputs)
            expected = outcome(module, module, inputs)
            assert_near(got, expected)
            for a, b in zip(got, expected, strict=True):
                assert a.stride() == b.stride()
    assert bool(launches) == (backend == "triton")
    with use_backend(backend), torch.no_grad():
        assert_equal(compiled(*inputs), module(*inputs))


@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize("name", ["add_norm", "qk_norm"])
def test_a_compiled_loss_of_one_output(name, used):
    """Dynamo hands the backward zeros for the output that nothing uses."""
    module = MODULES[name]()
    inputs = module.inputs()
    leaves, rest = leaves_of(module, inputs)

    def one(*leaves):
        outputs = module(*leaves, *rest)
        return outputs[used].square().sum()

    compiled = torch.compile(one, fullgraph=True, backend="aot_eager")
    with use_backend("triton"):
        y = compiled(*leaves)
        got = torch.autograd.grad(y, leaves)
    outputs = module.eager(*leaves, *rest)
    y = outputs[used].square().sum()
    expected = torch.autograd.grad(y, leaves)
    assert_near(got, expected, 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compile_of_a_norm_in_groups(backend):
    spec = NormSpec(False, 1e-6, group_size=16)
    x = random(4, 64)
    weight = random(64)

    def norm(t):
        return compute_norm(t, weight, None, spec)

    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    with use_backend(backend):
        assert torch.equal(compiled(x), norm(x))


@pytest.mark.full
@pytest.mark.parametrize("backend", BACKENDS)
def test_inductor(backend):
    compiler = shutil.which("g++") or shutil.which("clang++")
    if DEVICE == "cpu" and compiler is None:
        pytest.skip("Inductor needs a C++ compiler for the CPU, and there is none")
    module = Norms()
    compiled = torch.compile(module, fullgraph=True)
    inputs = module.inputs()
    with use_backend(backend):
        got = outcome(compiled, module, inputs)
        expected = outcome(module, module, inputs)
    assert_near(got, expected, 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("strict", [True, False])
def test_export(module, backend, strict):
    inputs = module.inputs()
    other_inputs = module.inputs(5, 3)
    batch = torch.export.Dim("batch", min=2, max=64)
    length = torch.export.Dim("length", min=2, max=64)
    sizes = {0: batch, 1: length}
    with use_backend(backend), torch.no_grad():
        program = torch.export.export(
            module, inputs, strict=strict, dynamic_shapes=(sizes,) * len(inputs)
        )
        exported = program.module()
        assert_equal(exported(*inputs), module(*inputs))
        assert_equal(exported(*other_inputs), module(*other_inputs))
    names = [str(node.target) for node in program.graph.nodes]
    fused = 0
    if backend == "triton":
        fused = module.calls
    assert names.count("hf_rmsnorm.norm_forward.default") == fused


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
def test_make_fx_records_the_operator_and_not_the_allocation(module, tracing_mode):
    first, *rest = module.inputs(1, 4)
    trace = make_fx(module, tracing_mode=tracing_mode, _allow_non_fake_inputs=True)
    with use_backend("triton"), torch.no_grad():
        graph = trace(first, *rest)
        for x in (first, 2 * first):
            expected = module(x, *rest)
            assert_equal(graph(x, *rest), expected)
    assert "hf_rmsnorm.norm_forward" in str(graph.code)


@pytest.mark.filterwarnings("ignore")
def test_jit_trace_sees_plain_operators(module):
    first, *rest = module.inputs(1, 4)
    with use_backend("triton"), torch.no_grad():
        traced = torch.jit.trace(module, (first, *rest))
    x = 2 * first
    with use_backend("reference"):
        expected = module(x, *rest)
    assert_equal(traced(x, *rest), expected)
