"""Short ways to ask what patch_model makes of one module."""

import contextlib
import sys
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


@contextlib.contextmanager
def calls_of(function):
    """The first argument of each call of a function; nothing in the function itself
    tells that it is watched.
    """
    calls = []
    code = function.__code__

    def profile(frame, event, _):
        if event == "call" and frame.f_code is code:
            calls.append(frame.f_locals[code.co_varnames[0]])

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield calls
    finally:
        sys.setprofile(before)
