"""This package's norms beside Liger's MLP and loss, both executed as compiled."""

import sys

import pytest
import tiny_models
import torch
from tolerance import assert_as_accurate

from benchmarks import variants
from hf_rmsnorm import count_launches, patch_model, unpatch_model, use_backend

liger = pytest.importorskip("liger_kernel.transformers", reason="the other package")

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma"]
ids = tiny_models.token_ids()
ORDERS = {"Liger first": False, "Liger last": True}


@pytest.fixture(params=FAMILIES)
def family(request, driver):
    """A family whose Python module has its own classes again when the test is over."""
    driver.machine.lenient = True
    type_of_model = type(tiny_models.build(request.param))
    space = vars(sys.modules[type_of_model.__module__])
    before = dict(space)
    yield request.param
    space.update(before)


def build(family):
    return tiny_models.build(family, dtype=torch.bfloat16)


def add_liger(model, rope=False):
    """Liger's MLP and loss: all that it swaps by default but norms and rotary."""
    patch = getattr(liger, f"apply_liger_kernel_to_{model.config.model_type}")
    patch(model=model, rms_norm=False, rope=rope)


def run(model):
    """Logits and what the first MLP gets, in inference; loss and gradients."""
    seen = []
    hook = model.model.layers[0].mlp.register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0].detach())
    )
    with use_backend("triton"):
        with torch.no_grad():
            logits = model.eval()(ids).logits
        hook.remove()
        loss = model.train()(ids, labels=ids).loss
        loss.backward()
    gradients = tiny_models.gradients(model)
    model.zero_grad()
    return {"logits": logits, "first": seen[0], "loss": loss.detach()}, gradients


def assert_equal(results, expected):
    for name, value in results.items():
        assert torch.equal(value, expected[name]), name


def with_both(family, liger_is_last):
    """(a model with both, the report of its patch)."""
    both = build(family)
    if not liger_is_last:
        add_liger(both)
    report = patch_model(both)
    if liger_is_last:
        add_liger(both)
    return both, report


@pytest.mark.parametrize("liger_is_last", ORDERS.values(), ids=ORDERS)
def test_both_work_together_in_either_order(family, liger_is_last):
    plain, exact = build(family), build(family).double()
    expected, _ = run(plain)
    _, exact_gradients = run(exact)
    alone = build(family)
    add_liger(alone)
    of_liger, gradients_of_liger = run(alone)

    both, report = with_both(family, liger_is_last)
    assert str(report) == str(patch_model(plain)), "Liger hides no norm and no sum"
    assert not report.skipped and len(report.swapped) >= 5

    with count_launches() as launches:
        got, gradients = run(both)
    assert launches.total() > 0
    assert torch.equal(got["first"], expected["first"]), "Liger is not in it yet"
    assert_equal(got, of_liger)
    for path, exact_one in exact_gradients.items():
        assert_as_accurate(gradients[path], gradients_of_liger[path], exact_one, path)

    assert unpatch_model(both) == len(report.swapped)
    left, gradients_left = run(both)
    assert_equal(left, of_liger)
    assert_equal(gradients_left, gradients_of_liger)
    assert "Liger" in both.model.layers[0].mlp._get_name(), "Liger's patch stays"


@torch.no_grad()
def test_liger_rotates_where_it_has_taken_the_rotary_embedding(family):
    """It exchanges a function that the fused attention looks up at each call."""
    both = build(family)
    patch_model(both)
    alone = build(family)
    add_liger(both, rope=True)
    add_liger(alone, rope=True)
    with use_backend("triton"), count_launches(both) as launches:
        logits = both(ids).logits
    assert torch.equal(logits, alone(ids).logits)
    assert launches.total() > 0 and "not fused" in str(launches)


def test_norms_that_liger_has_taken_are_named(family):
    model = build(family)
    getattr(liger, f"apply_liger_kernel_to_{family}")(model=model)
    with pytest.warns(UserWarning, match="changed no norm"):
        report = patch_model(model)
    assert not report.swapped
    assert all("liger_kernel" in record.reason for record in report.skipped)


def test_what_benchmarks_measure_leaves_nothing_behind(family):
    model = build(family)
    classes = tiny_models.types(model)
    spaces = [vars(sys.modules[type(model).__module__])]
    spaces += [vars(module) for module in model.modules()]
    before = [dict(space) for space in spaces]
    for variant in variants.TIMED.values():
        with variant.of(model) as report:
            assert (report is None) == (variant.ours is None)
            of_liger = "Liger" in model.model.layers[0].mlp._get_name()
            assert of_liger == (variant.liger is not None)
        assert spaces == before and tiny_models.types(model) == classes
