"""Classes made to be mistaken, and true norms in odd spellings, each compared with its own result and gradients."""

import copy
import inspect
import warnings

import pytest
import torch
from crafted import equal
from crafted_branches import BRANCHES, SERVED
from crafted_held import BUFFERS, CHANGED, DEVICES, HELD, LENGTHS, NEAR
from crafted_impostors import IMPOSTORS, Backward
from crafted_norms import NORMS
from reports import report_on

from hf_rmsnorm import unpatch_model, use_backend
from tests.unit.patching.formula.test_families import FAMILIES

LEFT_ALONE = IMPOSTORS + BRANCHES + HELD + BUFFERS + LENGTHS + DEVICES


def patched(module):
    module = copy.deepcopy(module)
    return module, report_on(module)


def by_name(cases):
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


def run(case, module):
    with warnings.catch_warnings(), use_backend("reference"):  # the formula, where it was taken for one
        warnings.simplefilter("ignore")
        return case.run(case.ready(module))


@by_name(LEFT_ALONE)
def test_an_impostor_is_named_and_left_alone(case):
    module = case.make()
    ours, report = patched(module)
    assert not report.swapped, report
    (record,) = report.skipped
    assert case.why in record.reason
    assert type(ours) is type(module)


@by_name([case for case in LEFT_ALONE if not case.effect])
def test_the_call_tells_the_impostor_from_the_norm(case):
    """So that the test above would fail with wrong results, were it taken for one."""
    theirs = run(case, case.make())
    norm, report = patched(case.imitated())
    assert report.swapped and not equal(run(case, norm), theirs)


@by_name(SERVED)
def test_what_is_patched_in_part_gives_its_own_results(case):
    module = case.make()
    ours, _ = patched(module)
    assert equal(run(case, ours), run(case, module))


@by_name(CHANGED)
def test_what_its_forward_reads_and_is_set_later_is_seen(case):
    norm, report = patched(case.make())
    assert report.swapped, report
    assert equal(run(case, norm), run(case, case.make()))
    fused = type(norm)
    case.change(norm)
    assert report_on(norm).skipped[0].reason.startswith("it runs its own forward")
    assert type(copy.deepcopy(norm)) is type(norm) is not fused
    assert unpatch_model(norm) == 1 and type(norm) is fused._hf_rmsnorm_base


def test_a_name_that_its_forward_does_not_read_changes_nothing():
    norm, _ = patched(CHANGED[0].make())
    fused = type(norm)
    for name in ("_hf_hook", "_is_fsdp_managed_module", "other", "weight", "eps", "training"):
        setattr(norm, name, getattr(norm, name, None))
    norm.register_buffer("seen", torch.zeros(()))
    norm.weight = torch.nn.Parameter(2 * norm.weight.detach())
    assert type(norm) is fused and not report_on(norm).skipped


def test_an_attribute_that_is_set_back_is_fused_again():
    norm, _ = patched(next(case for case in CHANGED if case.name == "a private name").make())
    norm._gain = 2.0
    assert report_on(norm).skipped[0].reason == "it runs its own forward: _gain is now 2.0"
    norm._gain = None
    assert report_on(norm).swapped


@by_name(NORMS + NEAR)
def test_a_norm_in_an_odd_spelling_is_recognised(case):
    module = case.make()
    ours, report = patched(module)
    assert report.swapped and not report.skipped, report
    for got, expected in zip(run(case, ours), run(case, module), strict=True):
        if expected is None:
            assert got is None
            continue
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected, rtol=2e-6, atol=2e-6 * expected.abs().max().item())


def clamped(s, forward, x, *gate):
    return forward(s, x.clamp(-1e4, 1e4), *gate)


def mended(s, forward, x, *gate):
    return forward(s, x, *gate).nan_to_num()


def clipped(s, forward, x, *gate):
    return forward(s, Backward.apply(x, lambda g: g.clamp(-50, 50)), *gate)


def doubled(asked):
    return lambda s, forward, x, *gate: forward(s, x, *gate) * (2 if asked(s, x) else 1)


AROUND = {
    "input clamped": clamped,
    "NaN mended": mended,
    "gradient clipped": clipped,
    "many elements": doubled(lambda s, x: x.numel() > 1e6),
    "many rows": doubled(lambda s, x: x.shape[0] > 5000),
    "in train mode": doubled(lambda s, x: s.training),
    "in inference mode": doubled(lambda s, x: torch.is_inference_mode_enabled()),
    "by a value": doubled(lambda s, x: x.abs().max() > 1e20),
    "on a GPU": doubled(lambda s, x: x.is_cuda),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_live_class_with_something_around_its_forward_is_left_alone(name):
    make, arguments, *_ = FAMILIES[name]
    for what, around in AROUND.items():
        module = make(*arguments)
        own = type(module).forward

        def forward(self, *inputs, own=own, around=around):
            return around(self, own, *inputs)

        forward.__signature__ = inspect.signature(own)
        module.__class__ = type(type(module).__name__, (type(module),), {"forward": forward})
        assert not report_on(module).swapped, what


def test_there_are_many_of_both():
    assert len(IMPOSTORS + BRANCHES) >= 80 and len(NORMS) >= 60
