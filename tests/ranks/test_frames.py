"""Python calls of an allreduce: of a small tensor they take as long as the operation."""

import importlib
import sys
from collections.abc import Callable
from types import FrameType

import numpy as np
import pytest


def calls_of(function: Callable[[], object]) -> list[str]:
    """Return the names of the Python functions that `function` calls."""
    names: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            names.append(frame.f_code.co_qualname)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return names[1:]


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_a_repeated_allreduce_makes_few_python_calls(framework: str) -> None:
    tensor = np.ones(4, np.float32)
    if framework == "torch":
        tensor = pytest.importorskip("torch").from_numpy(tensor)
    hvd = importlib.import_module(f"farandole.{framework}")

    hvd.init()  # of the process: ranks that are threads need another call to find their context
    try:
        hvd.allreduce(tensor), hvd.allreduce(tensor, name="again")
        unnamed = calls_of(lambda: hvd.allreduce(tensor))
        named = calls_of(lambda: hvd.allreduce(tensor, name="again"))
    finally:
        hvd.shutdown()
    assert len(unnamed) <= 7, unnamed
    assert len(named) <= 5, named
    assert named[0] == "Operations.allreduce"
