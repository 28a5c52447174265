"""Elastic jobs as real commands: ranks are killed, stopped in their work, added and taken away while they train."""

import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from system.elastic_training import DDP_TRAINING, LINE, TORCH_TRAINING, training
from system.launched import PATIENCE, farandole

pytestmark = pytest.mark.native


@pytest.mark.slow
@pytest.mark.parametrize("program", [TORCH_TRAINING, DDP_TRAINING], ids=["DistributedOptimizer", "DDP"])
def test_ranks_of_torch_are_lost_at_any_time(tmp_path: Path, program: str) -> None:
    """They commit after each step, without copies: survivors repeat none."""
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    dice = random.Random(seed)
    with training(tmp_path, "-np", "3", "--min-np", "1", "--max-np", "3", program=program) as job:
        job.wait(lambda: 3 in job.sizes(), "the first step")
        survivors: set[int] = set()
        killed: set[int] = set()
        for _ in range(4):
            since = len(job.output)
            job.wait(lambda since=since: len(job.sizes(since)) > 5, "steps go on")
            # Lines of processes that were killed may still arrive.
            pids = {number: pid for number, pid in job.pids(since).items() if pid not in killed}
            victims = dice.sample(sorted(pids), dice.randint(1, len(pids) - 1)) if len(pids) > 1 else []
            survivors = set(pids.values()) - {pids[victim] for victim in victims}
            for victim in victims:
                killed.add(pids[victim])
                os.kill(pids[victim], dice.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGSTOP]))
            time.sleep(dice.choice([0.0, 0.05, 0.3]))
        since = len(job.output)
        job.wait(lambda: 3 in job.sizes(since), "lost ranks are replaced")
        ended = job.finish()
        for pid in set(job.pids().values()):
            steps = [int(found[2]) for found in LINE.finditer(job.output) if int(found[5]) == pid]
            assert steps == sorted(set(steps))
    assert survivors & set(ended), "the survivors of the last loss went on in their processes"
    assert len(ended) == 3


LOSES_RANK_0 = """
import os, signal
import numpy, farandole.numpy as hvd
from farandole import elastic
hvd.init()

@elastic.run
def train(state):
    while state.step < 6:
        hvd.allreduce(numpy.ones(1), name="x")
        state.step += 1
        if state.step == 3 and hvd.rank() == 0 and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        state.commit()
        print(f"step {state.step} rank {hvd.rank()}", flush=True)

train(elastic.ObjectState(step=0))
"""


def test_the_filter_shows_the_rank_that_a_member_has_now(tmp_path: Path) -> None:
    words = ("run", "-np", "2", "--min-np", "1", "--output-filter", "rank0")
    done = farandole(*words, sys.executable, "-c", LOSES_RANK_0, cwd=tmp_path, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    lines = [line.partition(" ")[2] for line in done.stdout.splitlines()]
    assert lines[:2] == ["step 1 rank 0", "step 2 rank 0"] and lines[-1] == "step 6 rank 0"
    assert all(line.endswith("rank 0") for line in lines)
    assert "names rank 2 of 2" in farandole(*words[:-1], "2", "true").stderr


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
