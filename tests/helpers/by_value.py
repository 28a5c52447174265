"""Functions of a test module for ranks that cannot import it."""

import sys
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest

__all__ = ["sent_by_value"]


def sent_by_value(module: str) -> Any:
    """Return a fixture of `module` that sends its functions whole to ranks."""

    @pytest.fixture(scope="module", autouse=True)
    def by_value() -> Iterator[None]:
        cloudpickle.register_pickle_by_value(sys.modules[module])
        yield
        cloudpickle.unregister_pickle_by_value(sys.modules[module])

    return by_value
