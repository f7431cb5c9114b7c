"""Every family of kernels computes a formula as the reference does, or refuses it,
whatever field of it is set.
"""

from dataclasses import dataclass, fields, replace
from typing import get_args, get_type_hints

import pytest
import torch
from add_norm import fused_add_norm
from computed import compute_norm
from kernel_calls import norm_backward, norm_forward, qk_norm_forward

from hf_rmsnorm import NormSpec, use_backend
from hf_rmsnorm.kernels.serves import SERVES, unserved
from hf_rmsnorm.operands import of_norm
from hf_rmsnorm.ops import input_needed
from hf_rmsnorm.ops.limits import why_not
from hf_rmsnorm.ops.operators import spec_args, spec_from
from hf_rmsnorm.reference import reference_backward, reference_norm, reference_qk_norm

parametrize = pytest.mark.parametrize

BASES = {
    "RMSNorm": NormSpec(False, 1e-2),
    "LayerNorm": NormSpec(True, 1e-2, has_bias=True),
}


@dataclass(frozen=True)
class Doubled(NormSpec):
    """A formula with a field that no kernel has heard of."""

    doubled: bool = False


def values_of(name):
    """Other values than a field's default, by its type: a field that is added is set
    without a change here.
    """
    hint = get_type_hints(NormSpec)[name]
    kinds = get_args(hint) or (hint,)
    words = []
    for kind in kinds:
        for value in get_args(kind) or (kind,):
            if isinstance(value, str):
                words.append(value)
    if words:
        return words
    if bool in kinds:
        return [True, False]
    if int in kinds:
        return [8]
    return [0.25, 1.0]


def changed(base, name):
    """The formulas that differ from `base` in one field, by its value."""
    formulas = {}
    for value in values_of(name):
        if value == getattr(base, name):
            continue
        try:
            formulas[value] = replace(base, **{name: value})
        except ValueError:
            continue  # means nothing
    return formulas


SPECS = {
    "LayerNorm": BASES["LayerNorm"],
    "RMSNorm weight + 1": NormSpec(False, 1e-2, weight_offset=1.0),
    "invented": Doubled(False, 1e-2, doubled=True),
}
for base_name, base in BASES.items():
    for field in fields(NormSpec):
        for value, spec in changed(base, field.name).items():
            SPECS[f"{base_name} {field.name}={value}"] = spec


def operands(spec, *shape):
    generator = torch.Generator().manual_seed(0)
    x, residual, dy, gate = torch.randn(4, *shape, generator=generator)
    weight, bias = torch.rand(2, shape[-1], generator=generator) + 0.5
    if not spec.has_weight:
        weight = None
    if not spec.has_bias:
        bias = None
    if spec.gate is None:
        gate = None
    return x, residual, dy, weight, bias, gate


def assert_same(results, expected):
    for a, b in zip(results, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            largest = b.abs().max().item()
            atol = 1e-4 * max(1.0, largest)
            torch.testing.assert_close(a, b, rtol=1e-4, atol=atol)


def run_norm(spec):
    x, _, dy, weight, bias, gate = operands(spec, 2, 64)
    need = (True, weight is not None, bias is not None, gate is not None)
    _, y, rstd, mean = norm_forward(x, weight, bias, spec, True, gate)
    assert_same([y], [reference_norm(x, weight, bias, spec, gate)])
    gradients = norm_backward(dy, x, weight, bias, rstd, mean, spec, need, gate)
    expected = reference_backward(dy, x, weight, bias, spec, need, gate)
    assert_same(gradients, expected)


def run_sum(spec):
    x, residual, _, weight, bias, gate = operands(spec, 2, 64)
    h, y, *_ = norm_forward(x, weight, bias, spec, False, gate, residual)
    total = residual + x
    expected = reference_norm(total, weight, bias, spec, gate)
    assert_same([h, y], [total, expected])


def run_from_output(spec):
    x, _, dy, weight, bias, gate = operands(spec, 2, 64)
    need = (True, weight is not None, bias is not None, False)
    _, y, rstd, _ = norm_forward(x, weight, bias, spec, True, gate)
    gradients = norm_backward(
        dy, y, weight, bias, rstd, None, spec, need, gate, None, True
    )
    expected = reference_backward(dy, x, weight, bias, spec, need, gate)
    assert_same(gradients, expected)


def run_qk(spec):
    q = operands(spec, 1, 5, 4, 16)[0].transpose(1, 2)
    k = operands(spec, 1, 5, 2, 16)[0].transpose(1, 2)
    *_, weight, _, _ = operands(spec, 16)
    table = torch.randn(1, 5, 16)
    *outputs, _ = qk_norm_forward((q, k, weight, weight, table, table), spec)
    expected = reference_qk_norm(q, k, weight, weight, spec, table, table)
    assert_same(outputs, expected)


RUNS = {
    "rows": (run_norm, ("rows",)),
    "sum": (run_sum, ("rows", "residual sum")),
    "from the output": (run_from_output, ("rows", "from the output")),
    "queries and keys": (run_qk, ("queries and keys",)),
}


def served():
    """(case, formula) of all that some family says to serve."""
    for run, (_, families) in RUNS.items():
        for name, spec in SPECS.items():
            if unserved(spec, *families) is None:
                yield run, name


@parametrize("run, name", list(served()))
def test_a_launch_computes_each_formula_that_it_serves(run, name):
    launched, _ = RUNS[run]
    launched(SPECS[name])


@parametrize("family", SERVES)
def test_no_family_serves_a_field_that_it_does_not_know(family):
    assert not SPECS["invented"].axes <= SERVES[family]


@parametrize("name", SPECS)
def test_what_no_kernel_computes_falls_back_to_the_reference(name):
    spec = SPECS[name]
    x, _, _, weight, bias, gate = operands(spec, 2, 64)
    y = compute_norm(x, weight, bias, spec, gate)
    expected = reference_norm(x, weight, bias, spec, gate)
    assert_same([y], [expected])
    if spec.group_size or not why_not(spec, of_norm(x, weight, bias, gate)):
        return
    with use_backend("triton"), pytest.raises(RuntimeError, match="its formula has"):
        compute_norm(x, weight, bias, spec, gate)


@parametrize("name", [name for name, spec in SPECS.items() if spec.gate is None])
def test_a_sum_and_a_gradient_fall_back_to_the_reference(name):
    spec = SPECS[name]
    x, residual, dy, weight, bias, _ = operands(spec, 2, 64)
    total = residual + x
    both = fused_add_norm(x, residual, weight, bias, spec)
    assert_same(both, [total, reference_norm(total, weight, bias, spec)])
    served = not why_not(spec, of_norm(x, weight, bias))
    keep_output = served and not input_needed(weight, bias, spec)
    leaf = x.clone().requires_grad_()
    y = compute_norm(leaf, weight, bias, spec, keep_output=keep_output)
    expected = reference_norm(leaf, weight, bias, spec)
    gradients = torch.autograd.grad(y, leaf, dy)
    assert_same(gradients, torch.autograd.grad(expected, leaf, dy))


@parametrize("name", SPECS)
def test_operators_take_every_field_of_a_formula(name):
    spec = SPECS[name]
    if spec.group_size is None and type(spec) is NormSpec:
        assert spec_from(*spec_args(spec)) == spec
    else:
        with pytest.raises(TypeError, match="do not take"):
            spec_args(spec)
