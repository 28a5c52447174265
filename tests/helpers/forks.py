"""Forked processes that check something."""

import os
import signal
import warnings
from collections.abc import Callable

_SECONDS = 20


def forked(check: Callable[[], bool]) -> int:
    """Fork a process that calls `check`; return its number. It exits with 0 if that returned True within 20 s."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from 3.12 on, for a fork while threads run
        child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(_SECONDS)
            status = 0 if check() else 1
        finally:
            os._exit(status)
    return child
