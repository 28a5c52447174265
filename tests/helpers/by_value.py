"""Pickling of a test module's functions by value, for ranks that cannot import the module."""

import sys
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest


def sent_by_value(module: str) -> Any:
    """Return a fixture with which functions of `module` are pickled by value."""

    @pytest.fixture(scope="module", autouse=True)
    def by_value() -> Iterator[None]:
        cloudpickle.register_pickle_by_value(sys.modules[module])
        yield
        cloudpickle.unregister_pickle_by_value(sys.modules[module])

    return by_value
