"""Short ways to ask what patch_model makes of one module."""

import warnings

from hf_rmsnorm import patch_model


def report_on(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return patch_model(module)


def formula_of(module):
    report = report_on(module)
    assert not report.skipped, report
    (record,) = report.swapped
    return record.formula


def reason_for(module):
    report = report_on(module)
    assert not report.swapped, report
    (record,) = report.skipped
    return record.reason
