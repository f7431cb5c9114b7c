"""What the functions refuse, each with one line that names what, where and the cure."""

import pytest
import torch
from processes import python

from hf_rmsnorm import layer_norm, rms_norm, use_backend

X = torch.ones(2, 8)
WEIGHT = torch.ones(8)


@pytest.mark.parametrize("function", [rms_norm, layer_norm])
@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (([1.0, 2.0],), TypeError, "x is list: pass a floating-point tensor"),
        (
            (torch.ones(2, 8, dtype=torch.int64), WEIGHT),
            TypeError,
            "x is a tensor of torch.int64.*x.float\\(\\)",
        ),
        (
            (X, torch.ones(8, dtype=torch.int32)),
            TypeError,
            "weight is a tensor of torch.int32",
        ),
        (
            (X, torch.ones(7)),
            ValueError,
            r"weight has shape \(7,\), x \(2, 8\): pass \(8,\)",
        ),
        ((X, torch.ones(2, 8)), ValueError, r"weight has shape \(2, 8\)"),
        (
            (X, torch.ones(8, device="meta")),
            ValueError,
            "weight is on meta and x on cpu: move one",
        ),
        ((torch.tensor(1.0),), ValueError, "must hold at least one element"),
        ((torch.ones(3, 0),), ValueError, "must hold at least one element"),
    ],
)
def test_tensors(function, arguments, error, words):
    with pytest.raises(error, match=words) as raised:
        function(*arguments)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("function", [rms_norm, layer_norm])
@pytest.mark.parametrize("eps", [-1e-6, float("nan"), float("inf"), None, "1e-6"])
def test_eps(function, eps):
    with pytest.raises(ValueError, match="eps is .*: pass a finite float"):
        function(X, WEIGHT, eps=eps)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"rounding": "twice"}, "rounding is 'twice': choose one of"),
        ({"rounding": "weight_dtype"}, "a norm without weight has no"),
        ({"weight_offset": 1.0}, "a norm without weight has no weight_offset"),
    ],
)
def test_what_no_norm_without_a_weight_has(arguments, words):
    with pytest.raises(ValueError, match=words):
        rms_norm(X, **arguments)


def test_backend_names():
    with pytest.raises(
        ValueError,
        match="use_backend\\('cuda'\\): no such backend, choose one of auto, triton",
    ):
        use_backend("cuda")


def test_insisting_on_triton_where_it_cannot_run():
    with (
        use_backend("triton"),
        pytest.raises(RuntimeError, match="x is torch.float64; the kernels serve"),
    ):
        rms_norm(X.double(), WEIGHT.double())


@pytest.mark.full
@pytest.mark.parametrize("interpret", ["0", "1"])
def test_without_triton_everything_but_the_kernels_works(interpret, tmp_path):
    """`triton` is hidden from a new interpreter; TRITON_INTERPRET alone must not make
    us look for it.
    """
    program = """
import importlib.util, sys
real = importlib.util.find_spec
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError("No module named 'triton'", name="triton")
sys.meta_path.insert(0, Hide())
importlib.util.find_spec = lambda name, package=None: None if name == "triton" else real(name, package)
import torch, hf_rmsnorm
from hf_rmsnorm.ops import runs_on
print(runs_on("cpu"))
weight = torch.ones(8, requires_grad=True)
hf_rmsnorm.rms_norm(torch.ones(2, 8), weight).sum().backward()
module = torch.nn.LayerNorm(8)
report = hf_rmsnorm.patch_model(module)
assert len(report.swapped) == 1
assert torch.equal(module(torch.ones(2, 8)), torch.nn.LayerNorm(8)(torch.ones(2, 8)))
try:
    with hf_rmsnorm.use_backend("triton"):
        hf_rmsnorm.rms_norm(torch.ones(2, 8))
except RuntimeError as error:
    print(error)
assert "triton" not in sys.modules
"""
    said = python("-c", program, TRITON_INTERPRET=interpret)
    assert "plain PyTorch (triton is not installed)" in said
    assert "use_backend('triton'): triton is not installed" in said


def test_importing_the_package_loads_neither_triton_nor_transformers():
    program = "import sys, hf_rmsnorm; print(sorted({'torch', 'triton', 'transformers'} & set(sys.modules)))"
    assert python("-c", program) == "[]\n"
