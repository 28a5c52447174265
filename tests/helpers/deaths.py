"""A rank that dies when all others have left the operations before."""

import time
from pathlib import Path

from farandole.core.context import Context

PATIENCE = 60.0  # seconds


def wait_for_others(context: Context, victim: int, folder: Path) -> None:
    """Let the rank `victim`, which is about to die, wait until every other rank has come here; they do not wait.

    Otherwise a rank might hear of the death before it has left an operation that the victim has finished."""
    if context.rank != victim:
        (folder / f"rank {context.rank} is here").touch()
        return
    others = [folder / f"rank {rank} is here" for rank in range(context.size) if rank != victim]
    deadline = time.monotonic() + PATIENCE
    while not all(each.exists() for each in others):
        assert time.monotonic() < deadline, f"of {others} some did not come within {PATIENCE} s"
        time.sleep(0.001)
