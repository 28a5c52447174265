"""From kill -9 of a rank to the next step of another one, and how long the others wait when its successor joins.

The contenders run the same training: three ranks, a small model, steps of 20 ms, a copy of the state after each step.
farandole's survivors go on in their processes. `torchrun --max-restarts` ends all processes and starts them again: the
program reads the state of the last step from a file. Prints medians, least and most in seconds, and their ratio."""

import argparse
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

RANKS = 3
PATIENCE = 300.0  # seconds; torchrun may fail to connect its ranks, and starts them once more
COMMON = """
import os, sys, time, torch
STEPS, FLOATS = int(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
model = torch.nn.Linear(10, 1)
model.large = torch.nn.Parameter(torch.zeros(FLOATS))
def loss_of(step, rank):
    rows = torch.rand(32, 10, generator=torch.Generator().manual_seed(1000 * step + rank))
    return torch.nn.functional.mse_loss(model(rows), rows.sum(1, keepdim=True)) + model.large[0] * 0
def say(step, starts, size):
    print("step", time.monotonic(), os.getpid(), starts, size, step, flush=True)
"""
FARANDOLE = (
    COMMON
    + """
import farandole.torch as hvd
from farandole.torch import elastic
hvd.init()
starts = [0]
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
@elastic.run
def train(state):
    while state.step < STEPS:
        optimizer.zero_grad()
        loss_of(state.step, hvd.rank()).backward()
        optimizer.step()
        state.step += 1
        say(state.step, starts[0], hvd.size())
        time.sleep(0.02)
        state.commit()
state = elastic.TorchState(model, optimizer, step=0)
def count(): starts[0] += 1
state.register_reset_callbacks([count])
train(state)
"""
)
TORCHRUN = (
    COMMON
    + """
import torch.distributed as dist
dist.init_process_group("gloo")
ddp = torch.nn.parallel.DistributedDataParallel(model)
model = ddp
model.large = ddp.module.large
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
step = 0
if os.path.exists("state.pt"):
    saved = torch.load("state.pt")
    ddp.module.load_state_dict(saved["model"])
    step = saved["step"]
while step < STEPS:
    optimizer.zero_grad()
    loss_of(step, dist.get_rank()).backward()
    optimizer.step()
    step += 1
    say(step, int(os.environ["TORCHELASTIC_RESTART_COUNT"]), dist.get_world_size())
    time.sleep(0.02)
    if dist.get_rank() == 0:
        torch.save({"model": ddp.module.state_dict(), "step": step}, "new.pt")
        os.replace("new.pt", "state.pt")
"""
)
LINE = re.compile(r"step (\d+\.\d+) (\d+) (\d+) (\d+) (\d+)\n")


@dataclass(frozen=True)
class Step:
    """A finished step of one process."""

    at: float  # seconds of CLOCK_MONOTONIC
    pid: int
    starts: int  # how often the ranks have met again before
    size: int


class Job:
    """One contender's job in a folder."""

    def __init__(self, name: str, words: Sequence[str], program: str, floats: int, folder: Path) -> None:
        (folder / "train.py").write_text(program)
        self._out = folder / "out"
        with self._out.open("wb") as out:
            self._process = subprocess.Popen(
                [*words, "train.py", "1000000", str(floats)],
                cwd=folder,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self.name = name

    def steps(self) -> list[Step]:
        found = LINE.finditer(self._out.read_text(errors="replace"))
        return [Step(float(each[1]), int(each[2]), int(each[3]), int(each[4])) for each in found]

    def kill_one(self, dice: random.Random) -> float:
        """Kill a rank once all train; return the seconds until the next step of ranks that have met again."""
        recent = self._wait(_all_train)
        before = {each.pid: each.starts for each in recent}
        began = time.monotonic()
        os.kill(dice.choice(sorted(before)), signal.SIGKILL)

        def met_again(steps: list[Step]) -> list[Step]:
            later = [each for each in steps if each.at > began]
            newest = max(before.values())
            return [each for each in later if each.size < RANKS or each.starts > before.get(each.pid, newest)]

        return self._wait(met_again)[0].at - began

    def stalls(self) -> list[float]:
        """Return how long the survivors waited between two steps when a rank joined, less an ordinary step."""
        steps = self.steps()
        gaps: list[float] = []
        ordinary: list[float] = []
        last: dict[int, Step] = {}
        for each in steps:
            before = last.get(each.pid)
            if before is not None:
                (gaps if each.size > before.size else ordinary).append(each.at - before.at)
            last[each.pid] = each
        return [gap - statistics.median(ordinary) for gap in gaps]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)

    def _wait(self, pick: Callable[[list[Step]], list[Step]]) -> list[Step]:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            found = pick(self.steps())
            if found:
                return found
            if self._process.poll() is not None:
                break
            time.sleep(0.01)
        raise RuntimeError(f"{self.name} makes no progress:\n{self._out.read_text(errors='replace')[-3000:]}")


def _all_train(steps: list[Step]) -> list[Step]:
    """Return the last steps if they are those of all ranks."""
    last = steps[-20:]
    whole = len({each.pid for each in last}) == RANKS and all(each.size == RANKS for each in last)
    return last if whole and len(last) == 20 else []


def contenders(folder: Path) -> Iterator[tuple[str, list[str], str]]:
    run = [sys.executable, "-P", "-m"]
    sizes = ["-np", str(RANKS), "--min-np", "1", "--max-np", str(RANKS), "--blacklist-cooldown-range", "0.5", "0.5"]
    yield "farandole", [*run, "farandole.launch.cli", "run", *sizes, sys.executable], FARANDOLE
    restarts = ["--standalone", f"--nproc-per-node={RANKS}", "--max-restarts=1000", "--monitor-interval=0.1"]
    yield "torchrun", [*run, "torch.distributed.run", *restarts], TORCHRUN


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10, help="of each contender")
    parser.add_argument("--megabytes", type=float, default=1.0, help="of parameters")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    times: dict[str, list[float]] = {}
    stalls: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, words, program in contenders(Path(folder)):
            place = Path(folder, name)
            place.mkdir()
            dice = random.Random(given.seed)
            job = Job(name, words, program, int(given.megabytes * 1e6 / 4), place)
            try:
                times[name] = [job.kill_one(dice) for _ in range(given.kills)]
                stalls[name] = job.stalls()
            finally:
                job.close()
    for name, seconds in times.items():
        print(f"{name}: kill -9 to the next step: {_spread(seconds)}; {given.kills} kills")
        if stalls[name]:
            print(f"{name}: the others wait for a rank that joins: {_spread(stalls[name])}")
    ratio = statistics.median(times["torchrun"]) / statistics.median(times["farandole"])
    print(f"torchrun / farandole: {ratio:.1f}")


def _spread(seconds: Sequence[float]) -> str:
    return f"median {statistics.median(seconds):.3f} s (least {min(seconds):.3f}, most {max(seconds):.3f})"


if __name__ == "__main__":
    main()
