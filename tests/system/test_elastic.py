"""Elastic jobs as real commands: ranks are killed, stopped in their work, added and taken away while they train.

The program adds up whole numbers, so that its result does not depend on the sizes of the job: it is right only if each
step counted once. `ELASTIC_ROUNDS=200 pytest tests/system/test_elastic.py` is a longer run, ELASTIC_SEED repeats one.
"""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from system.launched import PATIENCE, command

pytestmark = pytest.mark.native

ROUNDS = int(os.environ.get("ELASTIC_ROUNDS", "20"))
SEED = int(os.environ.get("ELASTIC_SEED", "0")) or random.SystemRandom().randrange(1 << 30)

TRAINING = """
import os, sys, time
import numpy as np
import farandole.numpy as hvd
from farandole import elastic

hvd.init()
numbers = np.arange(1, 13)

@elastic.run
def train(state):
    while not state.over:
        mine = np.array([numbers[hvd.rank()::hvd.size()].sum() * (state.step + 1), os.path.exists("end")], np.int64)
        total, over = hvd.allreduce(mine, op=hvd.Sum)
        state.weight = (state.weight * 31 + int(total)) % 1_000_000_007
        state.step += 1
        state.over = bool(over)
        print("step", state.step, hvd.rank(), hvd.size(), os.getpid(), flush=True)
        time.sleep(0.01)
        state.commit()
    return state

state = train(elastic.ObjectState(step=0, weight=0, over=False))
print("done", state.step, state.weight, os.getpid(), flush=True)
"""
LINE = re.compile(r"\[(\d+)\] step (\d+) (\d+) (\d+) (\d+)\n")


def expected_weight(steps: int) -> int:
    weight = 0
    for step in range(steps):
        weight = (weight * 31 + 78 * (step + 1)) % 1_000_000_007
    return weight


@dataclass
class Training:
    """An elastic job in a folder, followed by its output."""

    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def output(self) -> str:
        return (self.folder / "stdout").read_text()

    def pids(self, since: int = 0) -> dict[int, int]:
        """The process of each member that has finished a step, in the output after `since` characters."""
        return {int(found[1]): int(found[5]) for found in LINE.finditer(self.output[since:])}

    def sizes(self, since: int = 0) -> list[int]:
        return [int(found[4]) for found in LINE.finditer(self.output[since:])]

    def wait(self, what: Callable[[], bool], why: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not what():
            assert self.process.poll() is None, f"the job has ended: {self.report()}"
            assert time.monotonic() < deadline, f"{why}: not within {PATIENCE} s (ELASTIC_SEED={SEED}): {self.report()}"
            time.sleep(0.02)

    def report(self) -> str:
        return (self.folder / "stderr").read_text()[-4000:] + self.output[-2000:]

    def finish(self) -> list[int]:
        """End the training, check what the ranks have computed, and return their processes."""
        (self.folder / "end").touch()
        assert self.process.wait(PATIENCE) == 0, self.report()
        ends = re.findall(r"done (\d+) (\d+) (\d+)\n", self.output)
        assert len({end[:2] for end in ends}) == 1, ends
        assert int(ends[0][1]) == expected_weight(int(ends[0][0])), f"ELASTIC_SEED={SEED}: {self.report()}"
        return [int(end[2]) for end in ends]


@contextmanager
def training(folder: Path, *options: str) -> Iterator[Training]:
    (folder / "train.py").write_text(TRAINING)
    words = command(
        "run", "--verbose", *options, "--blacklist-cooldown-range", "0.1", "0.2", sys.executable, "train.py"
    )
    with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
        process = subprocess.Popen(words, cwd=folder, stdout=out, stderr=err, start_new_session=True)
    try:
        yield Training(folder, process)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(PATIENCE)


def test_ranks_are_lost_at_any_time(tmp_path: Path) -> None:
    dice = random.Random(SEED)
    with training(tmp_path, "-np", "3", "--min-np", "1", "--max-np", "3") as job:
        job.wait(lambda: 3 in job.sizes(), "the first step")
        survivors: set[int] = set()
        killed: set[int] = set()
        for _ in range(ROUNDS):
            since = len(job.output)
            job.wait(lambda since=since: len(job.sizes(since)) > 5, "steps go on")
            # Lines of processes that were killed may still arrive.
            pids = {number: pid for number, pid in job.pids(since).items() if pid not in killed}
            victims = dice.sample(sorted(pids), dice.randint(1, len(pids) - 1)) if len(pids) > 1 else []
            survivors = set(pids.values()) - {pids[victim] for victim in victims}
            for victim in victims:
                killed.add(pids[victim])
                os.kill(pids[victim], dice.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM]))
            time.sleep(dice.choice([0.0, 0.05, 0.3]))
        since = len(job.output)
        job.wait(lambda: 3 in job.sizes(since), "lost ranks are replaced")
        ended = job.finish()
    assert survivors & set(ended), "the survivors of the last loss went on in their processes"
    assert len(ended) == 3


def test_hosts_come_and_go(tmp_path: Path) -> None:
    script = tmp_path / "hosts.sh"

    def offer(slots: int) -> None:
        (tmp_path / "new").write_text(f"echo localhost:{slots}\n")
        (tmp_path / "new").rename(script)

    offer(1)
    with training(
        tmp_path, "-np", "1", "--min-np", "1", "--max-np", "3", "--host-discovery-script", str(script)
    ) as job:
        job.wait(lambda: 1 in job.sizes(), "one rank trains")
        first = job.pids()[0]
        offer(3)
        job.wait(lambda: 3 in job.sizes(), "three ranks train")
        offer(2)
        since = len(job.output)
        job.wait(lambda: 2 in job.sizes(since), "two ranks train")
        assert first in job.finish()
    assert set(job.sizes()) <= {1, 2, 3}


def test_a_lost_state_ends_the_job_with_its_cause(tmp_path: Path) -> None:
    with training(tmp_path, "-np", "1", "--min-np", "1", "--max-np", "1") as job:
        job.wait(lambda: 1 in job.sizes(), "one rank trains")
        os.kill(job.pids()[0], signal.SIGKILL)
        assert job.process.wait(PATIENCE) == 137
    assert "no rank is left that has the state of the training" in job.report()
