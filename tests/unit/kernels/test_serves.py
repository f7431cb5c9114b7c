"""Every family of kernels computes a formula as the reference does, or refuses it,
whatever field of it is set.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, fields, replace
from typing import get_args, get_type_hints

import pytest
import torch
from add_norm import fused_add_norm
from launched import norm_backward, norm_forward, qk_norm_forward
from places import ROOT

from hf_rmsnorm import NormSpec, use_backend
from hf_rmsnorm.kernels.serves import SERVES
from hf_rmsnorm.ops import fused_norm, input_needed, resolve_backend
from hf_rmsnorm.ops.backend import device_refusal
from hf_rmsnorm.ops.operators import spec_args, spec_from
from hf_rmsnorm.reference import reference_backward, reference_norm, reference_qk_norm

pytestmark = pytest.mark.skipif(
    device_refusal("cpu") is not None, reason="needs TRITON_INTERPRET=1"
)
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
    words = [
        w for kind in kinds for w in (get_args(kind) or (kind,)) if isinstance(w, str)
    ]
    return words or (
        [True, False] if bool in kinds else [8] if int in kinds else [0.25, 1.0]
    )


def formulas():
    for name, base in BASES.items():
        for field in fields(NormSpec):
            for value in values_of(field.name):
                if value != getattr(base, field.name):
                    try:
                        yield (
                            f"{name} {field.name}={value}",
                            replace(base, **{field.name: value}),
                        )
                    except ValueError:
                        continue  # means nothing
    yield "LayerNorm", BASES["LayerNorm"]
    yield "RMSNorm weight + 1", NormSpec(False, 1e-2, weight_offset=1.0)
    yield "invented", Doubled(False, 1e-2, doubled=True)


SPECS = dict(formulas())


def operands(spec, *shape):
    generator = torch.Generator().manual_seed(0)
    x, residual, dy, gate = (torch.randn(*shape, generator=generator) for _ in range(4))
    weight, bias = (torch.rand(shape[-1], generator=generator) + 0.5 for _ in range(2))
    given = zip(
        (weight, bias, gate), (spec.has_weight, spec.has_bias, spec.gate), strict=True
    )
    return x, residual, dy, *(t if there else None for t, there in given)


def assert_same(found, expected):
    for got, want in zip(found, expected, strict=True):
        assert (got is None) == (want is None)
        if got is not None:
            torch.testing.assert_close(
                got, want, rtol=1e-4, atol=1e-4 * max(1.0, want.abs().max().item())
            )


def run_norm(spec):
    x, _, dy, weight, bias, gate = operands(spec, 2, 64)
    need = (True, weight is not None, bias is not None, gate is not None)
    y, rstd, mean, _ = norm_forward(x, weight, bias, spec, True, gate)
    assert_same([y], [reference_norm(x, weight, bias, spec, gate)])
    found = norm_backward(dy, x, weight, bias, rstd, mean, spec, need, gate)
    assert_same(found, reference_backward(dy, x, weight, bias, spec, need, gate))


def run_sum(spec):
    x, residual, _, weight, bias, gate = operands(spec, 2, 64)
    y, _, _, h = norm_forward(x, weight, bias, spec, False, gate, residual)
    assert_same(
        [h, y], [residual + x, reference_norm(residual + x, weight, bias, spec, gate)]
    )


def run_from_output(spec):
    x, _, dy, weight, bias, gate = operands(spec, 2, 64)
    need = (True, weight is not None, bias is not None, False)
    y, rstd, *_ = norm_forward(x, weight, bias, spec, True, gate)
    found = norm_backward(dy, y, weight, bias, rstd, None, spec, need, gate, None, True)
    assert_same(found, reference_backward(dy, x, weight, bias, spec, need, gate))


def run_qk(spec):
    q = operands(spec, 1, 5, 4, 16)[0].transpose(1, 2)
    k = operands(spec, 1, 5, 2, 16)[0].transpose(1, 2)
    *_, weight, _, _ = operands(spec, 16)
    table = torch.randn(1, 5, 16)
    *found, _ = qk_norm_forward((q, k, weight, weight, table, table), spec)
    assert_same(found, reference_qk_norm(q, k, weight, weight, spec, table, table))


RUNS = {
    "rows": (run_norm, ("rows",)),
    "sum": (run_sum, ("rows", "residual sum")),
    "from the output": (run_from_output, ("rows", "from the output")),
    "queries and keys": (run_qk, ("queries and keys",)),
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("run", RUNS)
def test_a_launch_computes_the_formula_or_refuses_it(name, run):
    spec = SPECS[name]
    launched, families = RUNS[run]
    if all(spec.axes <= SERVES[family] for family in families):
        launched(spec)
    else:
        with pytest.raises(NotImplementedError, match="its formula has"):
            launched(spec)
    assert name != "invented" or not any(
        spec.axes <= served for served in SERVES.values()
    )


@pytest.mark.parametrize("name", SPECS)
def test_what_no_kernel_computes_falls_back_to_the_reference(name):
    spec = SPECS[name]
    x, residual, dy, weight, bias, gate = operands(spec, 2, 64)
    served = resolve_backend(x, weight, bias, spec, gate) == "triton"
    if not served:
        with (
            use_backend("triton"),
            pytest.raises(RuntimeError, match="its formula has"),
        ):
            fused_norm(x, weight, bias, spec, None, gate)
    assert_same(
        [fused_norm(x, weight, bias, spec, None, gate)],
        [reference_norm(x, weight, bias, spec, gate)],
    )
    if gate is None:
        expected = residual + x, reference_norm(residual + x, weight, bias, spec)
        assert_same(fused_add_norm(x, residual, weight, bias, spec), expected)
        leaf = x.clone().requires_grad_()
        y = fused_norm(
            leaf,
            weight,
            bias,
            spec,
            None,
            None,
            served and not input_needed(weight, bias, spec),
        )
        expected = reference_norm(leaf, weight, bias, spec)
        assert_same(
            torch.autograd.grad(y, leaf, dy), torch.autograd.grad(expected, leaf, dy)
        )


@pytest.mark.parametrize("name", SPECS)
def test_operators_take_every_field_of_a_formula(name):
    spec = SPECS[name]
    if spec.group_size is None and type(spec) is NormSpec:
        assert spec_from(*spec_args(spec)) == spec
    else:
        with pytest.raises(TypeError, match="do not take"):
            spec_args(spec)


INVENTED = """
import torch
from hf_rmsnorm import NormSpec, count_launches
from hf_rmsnorm.ops import fused_norm, input_needed
from hf_rmsnorm.ops.launches import launches_of
from hf_rmsnorm.ops.norm import run
from hf_rmsnorm.ops.qk import run_qk
from hf_rmsnorm.reference import reference_norm

spec, x, weight = NormSpec(False, 1e-6, doubled=True), torch.randn(3, 64), torch.rand(64)
expected = reference_norm(x, weight, None, spec)
assert torch.equal(expected, 2 * reference_norm(x, weight, None, NormSpec(False, 1e-6)))
with count_launches() as launches:
    assert torch.equal(fused_norm(x, weight, None, spec), expected)
    assert run(launches_of(spec), (x, weight, None, None, None, None, torch.zeros_like(x))) is None
    heads, tables = x[None, None], x[None]
    assert run_qk(launches_of(spec), (heads, heads, weight, weight, tables, tables)) is None
    compiled = torch.compile(lambda t: fused_norm(t, weight, None, spec), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), expected)
    assert input_needed(weight, None, spec)
assert not launches, launches
fused_norm(x, weight.detach(), None, NormSpec(False, 1e-6), "triton")
"""


@pytest.mark.full
def test_a_field_added_to_the_formula_and_the_reference_alone(tmp_path):
    shutil.copytree(
        ROOT / "hf_rmsnorm",
        tmp_path / "hf_rmsnorm",
        ignore=shutil.ignore_patterns("demo", "__pycache__"),
    )
    for file, before, after in (
        (
            "formula.py",
            "    group_size: int | None = None\n",
            "    doubled: bool = False\n",
        ),
        (
            "reference.py",
            "        h = h + bias\n",
            "    h = 2 * h if spec.doubled else h\n",
        ),
    ):
        text = (tmp_path / "hf_rmsnorm" / file).read_text()
        assert text.count(before) == 1
        (tmp_path / "hf_rmsnorm" / file).write_text(
            text.replace(before, before + after)
        )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", INVENTED]
    run = subprocess.run(
        command, env=environment, capture_output=True, text=True, cwd=tmp_path
    )
    assert run.returncode == 0, run.stderr[-2000:]
