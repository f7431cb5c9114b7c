"""Which parameters leave enough of the input in the output, at each bound, and how long that is believed."""

import pytest
import torch
from torch import nn

from hf_rmsnorm.formula import NormSpec
from hf_rmsnorm.ops import from_output
from hf_rmsnorm.ops.from_output import (
    LEAST_SCALE,
    MOST_BIAS,
    SMALLEST_SCALE,
    formula_refusal,
    keeps_output,
    note_backward,
    parameters_refusal,
    serves_as_input,
)

D = 64
SPEC, GEMMA = NormSpec(False, 1e-6), NormSpec(False, 1e-6, weight_offset=1.0)
BIASED = NormSpec(True, 1e-6, has_bias=True)


def filled(first, rest=1.0):
    t = torch.full((D,), rest)
    t[0] = first
    return nn.Parameter(t)


@pytest.mark.parametrize(
    "weight, bias, spec, refusal",
    [
        (None, None, SPEC, None),
        (None, filled(0.0), BIASED, "a bias alone"),
        (filled(1.0), None, SPEC, None),
        (filled(-LEAST_SCALE), None, SPEC, None),
        (filled(LEAST_SCALE * 0.99), None, SPEC, "a weight is below"),
        (filled(0.0), None, SPEC, "a weight is below"),
        (filled(float("nan")), None, SPEC, "a weight is below"),
        (filled(SMALLEST_SCALE, SMALLEST_SCALE), None, SPEC, None),
        (filled(SMALLEST_SCALE * 0.99, SMALLEST_SCALE), None, SPEC, "a weight is below"),
        (filled(LEAST_SCALE * 99, 100.0), None, SPEC, "a weight is below"),
        (filled(0.0, 0.0), None, GEMMA, None),
        (filled(-1.0, 0.0), None, GEMMA, "a weight is below"),
        (filled(1.0), filled(MOST_BIAS), BIASED, None),
        (filled(1.0), filled(-MOST_BIAS), BIASED, None),
        (filled(1.0), filled(MOST_BIAS * 1.01), BIASED, "a bias is above 4 times"),
        (filled(0.5), filled(3.9), BIASED, "a bias is above 4 times"),
        (torch.ones(D, device="meta"), None, SPEC, "not here as plain tensors"),
        (filled(1.0), torch.ones(D, device="meta"), BIASED, "not here as plain tensors"),
        (torch.ones(0), None, SPEC, "DeepSpeed"),
    ],
)
def test_parameters_at_each_bound(weight, bias, spec, refusal):
    found = parameters_refusal(weight, bias, spec)
    assert found == refusal if refusal is None else refusal in found
    assert parameters_refusal(weight, bias, spec) == found


def test_the_bounds_are_those_of_the_formats():
    """A scale of float16's smallest normal number, and as large a bias as the largest element of a row."""
    assert torch.finfo(torch.float16).tiny == SMALLEST_SCALE
    assert (LEAST_SCALE, MOST_BIAS) == (1e-3, 4.0)


def test_inference_tensors_have_no_versions():
    with torch.inference_mode():
        weight = torch.ones(D)
    assert "not here as plain tensors" in parameters_refusal(weight, None, SPEC)
    assert "not here as plain tensors" in parameters_refusal(filled(1.0), weight, BIASED)


def test_parameters_that_deepspeed_manages():
    weight, bias = filled(1.0), filled(1.0)
    bias.ds_id = 3
    assert "DeepSpeed" in parameters_refusal(weight, bias, BIASED)
    weight.ds_id = 3
    assert "DeepSpeed" in parameters_refusal(weight, None, SPEC)


@pytest.fixture
def looks(monkeypatch):
    made, real = [], from_output._look
    monkeypatch.setattr(from_output, "_look", lambda device: (made.append(device), real(device)))
    return made


def write(t, value):
    with torch.no_grad():
        t[0] = value


def put(t, value):
    t.data = filled(value).data


@pytest.mark.parametrize("change", [write, put])
@pytest.mark.parametrize("which", [0, 1])
def test_what_is_known_ends_with_a_write_of_either_parameter(which, change, looks):
    parameters, other = (filled(1.0), filled(1.0)), (filled(1.0), filled(1.0))
    for each in (parameters, other):
        assert parameters_refusal(*each, BIASED) is None
    assert len(looks) == 2  # of what is new
    assert parameters_refusal(*parameters, BIASED) is None and len(looks) == 3
    change(other[which], 0.0 if which == 0 else 9.0)
    assert ("a weight", "a bias")[which] in parameters_refusal(*other, BIASED)
    assert len(looks) == 4  # though what the third saw of it was not asked for yet


def test_norms_are_looked_at_together_when_one_is_asked_about_again(looks):
    norms = [filled(1.0) for _ in range(3)]
    for weight in norms:
        parameters_refusal(weight, None, SPEC)
    for forward in range(3):
        looks.clear()
        norms[2].data[0] = forward % 2  # which moves no version
        found = [parameters_refusal(weight, None, SPEC) for weight in norms]
        assert len(looks) == 1 and found[:2] == [None, None]
        assert (found[2] is None) == (forward % 2 == 1)


def test_what_is_known_ends_with_a_backward_and_not_within_one(looks):
    weight = filled(1.0)
    parameters_refusal(weight, None, SPEC)

    def in_backward(gradient):
        weight.data[0] = 0.0  # which moves no version
        note_backward()
        assert parameters_refusal(weight, None, SPEC) is None  # as it was in the forward

    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(in_backward)
    y.backward()
    assert len(looks) == 1
    assert "a weight is below" in parameters_refusal(weight, None, SPEC) and len(looks) == 2
    other = filled(1.0)
    parameters_refusal(other, None, SPEC)
    parameters_refusal(weight, None, SPEC)  # again, by which the other is looked at too
    other.data[0] = 0.0
    note_backward()
    assert "a weight is below" in parameters_refusal(other, None, SPEC)


def test_one_weight_under_two_offsets_and_with_two_biases(looks):
    weight, small, large = filled(-1.0, 0.5), filled(0.0, 0.0), filled(9.0)
    for _ in range(2):
        assert parameters_refusal(weight, None, SPEC) is None
        assert "a weight" in parameters_refusal(weight, None, GEMMA)
        assert parameters_refusal(weight, small, BIASED) is None
        assert "a bias" in parameters_refusal(weight, large, BIASED)


def test_all_that_have_changed_are_looked_at_together(looks):
    """Of every shape and dtype, with a bias or without; those that died meanwhile are forgotten."""
    kept = [(filled(1.0), None), (filled(0.0), None), (filled(1.0), filled(9.0)), (filled(1.0), filled(1.0)),
            (nn.Parameter(torch.ones(D).bfloat16()), None), (nn.Parameter(torch.ones(D + 1)), None),
            (nn.Parameter(torch.zeros(2, D)), None)]  # fmt: skip
    expected = [None, "weight", "bias", None, None, None, "weight"]
    gone = filled(1.0)
    for each in (*kept, (gone, None)):
        parameters_refusal(*each, BIASED if each[1] is not None else SPEC)
    count = len(from_output._seen)
    del gone, each
    assert len(from_output._seen) == count - 1
    note_backward()
    looks.clear()
    for each, reason in zip(kept, expected, strict=True):
        found = parameters_refusal(*each, BIASED if each[1] is not None else SPEC)
        assert found is None if reason is None else reason in found
    assert len(looks) == 1


def test_a_bias_that_died_alone_is_no_obstacle():
    weight, bias = filled(1.0), filled(1.0)
    parameters_refusal(weight, bias, BIASED)
    del bias
    note_backward()
    assert parameters_refusal(weight, None, SPEC) is None
    assert parameters_refusal(weight, filled(9.0), BIASED) is not None


def test_a_graph_that_is_captured_believes_what_is_known_and_looks_at_nothing(monkeypatch, looks):
    known, new = filled(1.0), filled(1.0)
    parameters_refusal(known, None, SPEC)
    monkeypatch.setattr(from_output, "capturing", lambda t: True)
    assert parameters_refusal(known, None, SPEC) is None
    assert "before a graph was captured" in parameters_refusal(new, None, SPEC)
    assert len(looks) == 1
    assert not keeps_output(known, None, SPEC)
    monkeypatch.undo()
    assert keeps_output(known, None, SPEC)


@pytest.mark.parametrize(
    "spec, refused",
    [(SPEC, False), (NormSpec(False, 1e-6, rounding="rstd"), True), (NormSpec(False, 1e-6, gate="silu_after"), True),
     (NormSpec(False, 1e-6, eps_outside=True), True), (NormSpec(False, 1e-6, rounding="weight_dtype"), False)],
)  # fmt: skip
def test_formulas_whose_input_follows_from_their_output(spec, refused):
    assert (formula_refusal(spec) is not None) == refused
    assert keeps_output(filled(1.0), None, spec) != refused
    assert not keeps_output(filled(0.0), None, spec)
    with torch.no_grad():
        assert not keeps_output(filled(1.0), None, spec)


FUNCTIONAL = NormSpec(True, 1e-6, functional=True)
X = torch.ones(2, 3, 32)
STRIDED = torch.ones(3, 2, 32).transpose(0, 1)


@pytest.mark.parametrize(
    "y, x, weight, spec, serves",
    [
        (X, X, torch.ones(32), SPEC, True),
        (X.bfloat16(), X, None, SPEC, False),
        (X, STRIDED, None, SPEC, False),
        (STRIDED, STRIDED, None, SPEC, True),
        (X, STRIDED, None, FUNCTIONAL, True),
        (X[..., :31].contiguous(), X[..., :31].contiguous(), None, SPEC, False),
        (X, X, torch.ones(32).as_subclass(type("Tagged", (torch.Tensor,), {})), SPEC, False),
    ],
)
def test_outputs_that_stand_for_their_inputs(y, x, weight, spec, serves):
    assert serves_as_input(y, x, weight, None, spec) == serves
