"""What goes wrong in training goes wrong as without a patch: the same errors, the same
NaNs, the same steps skipped.
"""

import copy
import math

import pytest
import tiny_models
import torch
from tiny_models import gradients
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_rmsnorm import count_launches, patch_model, use_backend

ids = tiny_models.token_ids(1, 8)
EFFICIENT = {"memory_efficient": True}
# sums, q and k norms with rotary; LayerNorm with bias
RUNS = [("qwen3", {}), ("gpt2", {}), ("gpt2", EFFICIENT)]
runs = pytest.mark.parametrize(("family", "options"), RUNS)


@pytest.fixture(autouse=True)
def kernels():
    with use_backend("triton"):
        yield


def build(family, options=None):
    """A tiny model in training mode, without dropout; patched with options, if any."""
    model = tiny_models.build(family, num_hidden_layers=1).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if options is not None:
        report = patch_model(model, strict=True, **options)
        notes = [record.notes for record in report.swapped]
        assert ("keeps its output" in str(notes)) == bool(options)
    return model


def norm_parameters(model):
    parameters = {}
    for path, norm in tiny_models.norms(model):
        for name, parameter in norm.named_parameters():
            parameters[f"{path}.{name}"] = parameter
    return parameters


def assert_close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


def outcome_of_a_change(model, name):
    """The error of a backward before which a parameter was changed in place, or ""."""
    model.zero_grad()
    loss = model(ids, labels=ids).loss
    with torch.no_grad():
        model.get_parameter(name).add_(0.0)
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return ""


@runs
def test_a_parameter_changed_before_the_backward_is_eagers_error(family, options):
    plain = build(family)
    model = build(family, options)
    for name in norm_parameters(plain):
        expected = outcome_of_a_change(plain, name)
        got = outcome_of_a_change(model, name)
        is_bias = name.endswith("bias")
        assert is_bias or "modified by an inplace operation" in expected, name
        # a backward that reads the output needs the bias
        if expected or (is_bias and options):
            assert "modified by an inplace operation" in got, name
        else:
            assert not got, name
            assert_close(gradients(model), gradients(plain))


# the square of the last is inf
BAD_VALUES = [
    (1, 3, math.nan),
    (2, 5, math.inf),
    (3, 0, -math.inf),
    (4, 1, 1e30),
]


@pytest.mark.parametrize("memory_efficient", [False, True])
@pytest.mark.parametrize("make", [LlamaRMSNorm, nn.LayerNorm])
def test_gradients_of_bad_rows_are_eagers_row_by_row(make, memory_efficient):
    """In the input or in the incoming gradient: a row's dx is bad where eager's is, and
    no other row's is.
    """
    x = torch.randn(9, 64)
    dy = torch.randn(9, 64)
    for row, column, value in BAD_VALUES:
        x[row, column] = value
    x[5] = 0.0
    dy[8] = 0.0
    dy[6, 2] = math.nan
    dy[7, 2] = math.inf
    norm = make(64)
    fused = copy.deepcopy(norm)
    patch_model(fused, memory_efficient=memory_efficient)
    expected = results_of(norm, x, dy)
    with count_launches() as launches:
        results = results_of(fused, x, dy)
    assert launches.total() >= 2
    for got, eager in zip(results, expected, strict=True):
        # whether an infinite dy gives inf or NaN depends on how rows are vectorised
        finite = eager.isfinite()
        assert torch.equal(got.isfinite(), finite)
        got = got[finite]
        eager = eager[finite]
        torch.testing.assert_close(got, eager, rtol=1e-5, atol=1e-5)
    y, dx, *_ = results
    assert torch.equal(y.isnan(), expected[0].isnan())
    is_good = dx.isfinite().all(1)
    (good,) = is_good.nonzero(as_tuple=True)
    assert good.tolist() == [0, 4, 5, 8]


def results_of(norm, x, dy):
    """(y, dx, gradients of the parameters)."""
    leaf = x.requires_grad_()
    y = norm(leaf)
    leaves = [leaf, *norm.parameters()]
    grads = torch.autograd.grad(y, leaves, dy)
    return y.detach(), *grads
