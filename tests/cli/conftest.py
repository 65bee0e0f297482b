"""Recorded runs, as the store's tests make them."""

from tests.store.conftest import make_groups, make_run

__all__ = ["make_groups", "make_run"]
