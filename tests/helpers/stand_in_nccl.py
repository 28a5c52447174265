"""Loader of the stand-in for NCCL, which tests name as the library to open."""

import ctypes
import os
from functools import cache

import pytest

from farandole.core.wiring import start
from helpers import stand_in_cuda

# Not NCCL's own name: the library stays in this process, and only the tests that name its file shall find it.
_NAME = "libstand_in_nccl.so.2"


@cache
def load() -> ctypes.CDLL:
    """Load the stand-ins for CUDA and NCCL, and return the latter; build them if no test has done so. They stay loaded.

    Skips the test in a process that has NCCL, as PyTorch's CUDA build loads it: the engine takes that one."""
    stand_in_cuda.load()
    try:
        ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return ctypes.CDLL(_file())
    pytest.skip("this process has NCCL; the stand-in for it needs a process without")


def choose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engines of a test open the stand-in."""
    load()
    monkeypatch.setattr(start, "find_nccl", lambda: [_file()])


def _file() -> str:
    return str(stand_in_cuda.built("stand_in_nccl", _NAME))
