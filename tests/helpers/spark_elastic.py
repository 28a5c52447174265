"""Elastic training on Spark's or Ray's ranks: each notes its place in a folder, and the result shows lost steps."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from system.elastic_training import expected_weight

__all__ = ["NotedPlace", "expected_weight", "place_of", "training"]

PATIENCE = 100.0  # seconds


@dataclass(frozen=True)
class NotedPlace:
    step: int
    size: int
    pid: int


def training(folder: str) -> tuple[int, int, str]:
    """Train until a file "end" is in `folder`; return the steps, the weight and the local rank."""
    import numpy as np

    import farandole.numpy as hvd
    from farandole import elastic

    hvd.init()
    numbers = np.arange(1, 13)

    @elastic.run
    def train(state: elastic.ObjectState) -> None:
        while not state.over:
            over = os.path.exists(f"{folder}/end")
            mine = np.array([numbers[hvd.rank() :: hvd.size()].sum() * (state.step + 1), over], np.int64)
            total, ends = hvd.allreduce(mine, op=hvd.Sum)
            state.weight = (state.weight * 31 + int(total)) % 1_000_000_007
            state.step += 1
            state.over = bool(ends)
            written = f"{folder}/written-{os.getpid()}"
            with open(written, "w") as file:
                file.write(f"{state.step} {hvd.size()} {os.getpid()}")
            os.rename(written, f"{folder}/{hvd.rank()}")
            time.sleep(0.01)
            state.commit()

    state = elastic.ObjectState(step=0, weight=0, over=False)
    train(state)
    print("the training is over")
    return state.step, state.weight, os.environ["HOROVOD_LOCAL_RANK"]


def place_of(folder: Path, *, rank: int, size: int, not_pid: int = 0) -> NotedPlace:
    """Wait until `rank` trains as one of `size`, in another process than `not_pid`."""
    deadline = time.monotonic() + PATIENCE
    while True:
        if (folder / str(rank)).exists():
            place = NotedPlace(*map(int, (folder / str(rank)).read_text().split()))
            if place.size == size and place.pid != not_pid:
                return place
        assert time.monotonic() < deadline, f"rank {rank} of {size} does not train after {PATIENCE} s"
        time.sleep(0.05)
