"""Imports of large libraries."""

import gc

import pytest

from unfreeze.core.lazy import importing


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("fails", [False, True])
def test_no_garbage_is_looked_for_meanwhile_and_afterwards_as_before(wanted, fails):
    before = gc.isenabled()
    (gc.enable if wanted else gc.disable)()
    try:
        with importing():
            assert not gc.isenabled()
            if fails:
                raise ImportError
    except ImportError:
        assert fails
    finally:
        left = gc.isenabled()
        (gc.enable if before else gc.disable)()
    assert left is wanted
