"""The modules by which norms are called."""

import pytest


@pytest.fixture(params=["norm", "add_norm", "qk_norm"])
def module(request):
    # not before pytest_configure has chosen how kernels run
    from tests.unit.ops.modules import MODULES

    return MODULES[request.param]()
