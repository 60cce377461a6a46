"""Fixtures of the optimizer tests."""

import pytest
from optim_helpers import MAKERS


@pytest.fixture(params=MAKERS)
def make(request):
    """A maker of each optimizer: make(**options)."""
    return MAKERS[request.param]
