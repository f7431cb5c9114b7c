"""Classes made to be mistaken, and true norms in odd spellings, each compared with its own result and gradients."""

import copy
import warnings

import pytest
import torch
from crafted import equal
from crafted_branches import BRANCHES, SERVED
from crafted_impostors import IMPOSTORS
from crafted_norms import NORMS
from reports import report_on

from hf_rmsnorm import use_backend


def patched(module):
    module = copy.deepcopy(module)
    return module, report_on(module)


def by_name(cases):
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


def run(case, module):
    with warnings.catch_warnings(), use_backend("reference"):  # the formula, where it was taken for one
        warnings.simplefilter("ignore")
        return case.run(case.ready(module))


@by_name(IMPOSTORS + BRANCHES)
def test_an_impostor_is_named_and_left_alone(case):
    module = case.make()
    ours, report = patched(module)
    assert not report.swapped, report
    (record,) = report.skipped
    assert case.why in record.reason
    assert type(ours) is type(module)


@by_name([case for case in IMPOSTORS + BRANCHES if not case.effect])
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


@by_name(NORMS)
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


def test_there_are_many_of_both():
    assert len(IMPOSTORS + BRANCHES) >= 80 and len(NORMS) >= 60
