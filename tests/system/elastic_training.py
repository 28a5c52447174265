"""Training of an elastic job as a real command, followed by its output.

The program adds up whole numbers, so that its result does not depend on the sizes of the job: it is right only if each
step counted once."""

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from system.launched import PATIENCE, command

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
# Gradients are whole numbers, so sums are exact in any order. `seen` changes before it is sure that a step is finished.
TORCH_TRAINING = """
import os, time, torch
import farandole.torch as hvd
from farandole.torch import elastic

hvd.init()

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        weights = [torch.nn.Parameter(torch.zeros(size, dtype=torch.float64)) for size in (1, 9, 300000)]
        self.weights = torch.nn.ParameterList(weights)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, number):
        self.seen += 1
        return sum((index + 1) * number * each.sum() for index, each in enumerate(self.weights))

model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=1.0)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=hvd.Sum)
numbers = range(1, 13)

@elastic.run
def train(state):
    while not state.over:
        mine = sum(numbers[hvd.rank()::hvd.size()]) * (state.step + 1)
        optimizer.zero_grad()
        model(float(mine)).backward()
        over = torch.tensor(os.path.exists("end"), dtype=torch.int64)
        over = bool(hvd.allreduce(over, op=hvd.Sum, name="over"))
        optimizer.step()
        state.step += 1
        state.over = over
        print("step", state.step, hvd.rank(), hvd.size(), os.getpid(), flush=True)
        time.sleep(0.01)
        state.commit()
    return state

state = train(elastic.TorchState(model, optimizer, copies=False, step=0, over=False))
velocity = total = 0
for step in range(state.step):
    velocity += 78 * (step + 1)
    total -= velocity
assert int(model.seen) == state.step, (int(model.seen), state.step)
for index, each in enumerate(model.weights):
    assert bool((each == (index + 1) * total).all()), (index, each, total)
print("done", state.step, total, os.getpid(), flush=True)
"""
# The same, by DistributedDataParallel, which takes the average of the ranks' gradients.
DDP_TRAINING = (
    TORCH_TRAINING.replace(
        "optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=hvd.Sum)\n", ""
    )
    .replace("        model(float(mine)).backward()", "        ddp(float(mine * hvd.size())).backward()")
    .replace(
        "def train(state):\n",
        "def train(state):\n"
        "    torch.distributed.init_process_group('farandole')\n"
        "    ddp = torch.nn.parallel.DistributedDataParallel(model)\n",
    )
)
LINE = re.compile(r"\[(\d+)\](?:<stdout>:| )step (\d+) (\d+) (\d+) (\d+)\n")


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
    checks_itself: bool = False

    @property
    def output(self) -> str:
        return (self.folder / "stdout").read_text()

    def pids(self, since: int = 0) -> dict[int, int]:
        """The process of each member that has finished a step, in the output after `since` characters."""
        return {int(found[1]): int(found[5]) for found in LINE.finditer(self.output[since:])}

    def sizes(self, since: int = 0) -> list[int]:
        return [int(found[4]) for found in LINE.finditer(self.output[since:])]

    def wait(self, what: Callable[[], bool], why: str, patience: float = PATIENCE) -> None:
        deadline = time.monotonic() + patience
        while not what():
            assert self.process.poll() is None, f"the job has ended: {self.report()}"
            assert time.monotonic() < deadline, f"{why}: not within {patience} s: {self.report()}"
            time.sleep(0.02)

    def report(self) -> str:
        return (self.folder / "stderr").read_text()[-4000:] + self.output[-2000:]

    def finish(self) -> list[int]:
        """End the training, check what the ranks have computed, and return their processes."""
        (self.folder / "end").touch()
        assert self.process.wait(PATIENCE) == 0, self.report()
        ends = re.findall(r"done (\d+) (-?\d+) (\d+)\n", self.output)
        assert len({end[:2] for end in ends}) == 1, ends
        if not self.checks_itself:
            assert int(ends[0][1]) == expected_weight(int(ends[0][0])), self.report()
        return [int(end[2]) for end in ends]


class Survivors:
    """The members of a job whose launcher was killed, followed by the files that their output goes to."""

    def __init__(self, job: Training) -> None:
        self._job, self._folder = job, job.folder / "home/.local/state/farandole"

    def lines(self) -> list[tuple[int, int, int]]:
        """The step, the size and the process of each line."""
        found = re.finditer(r"^step (\d+) \d+ (\d+) (\d+)$", self.output(), re.MULTILINE)
        return [(int(each[1]), int(each[2]), int(each[3])) for each in found]

    def output(self) -> str:
        return "".join(each.read_text() for each in self._folder.glob("*/*"))

    def wait(self, size: int, since: int) -> int:
        """Wait until `size` ranks train on after step `since`; return their latest step."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            steps = [step for step, ranks, _ in self.lines() if ranks == size and step > since + 5]
            if steps:
                return max(steps)
            time.sleep(0.02)
        raise AssertionError(f"{size} ranks do not train: {self.output()[-2000:]}")

    def wait_ended(self, pids: Iterable[int]) -> None:
        deadline = time.monotonic() + PATIENCE
        while any(map(is_alive, pids)):
            assert time.monotonic() < deadline, self.output()[-2000:]
            time.sleep(0.02)

    def ends(self) -> list[tuple[int, int, int]]:
        """The steps, the result and the process of each member that has ended well."""
        found = re.findall(r"done (\d+) (\d+) (\d+)\n", self.output())
        return [(int(steps), int(weight), int(pid)) for steps, weight, pid in found]


def is_alive(pid: int) -> bool:
    """Return whether the process runs or is stopped; one that has ended may wait for init to take note."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in ("Z", "X")


@contextmanager
def training(
    folder: Path,
    *options: str,
    program: str = TRAINING,
    run: Sequence[str] = (*command("run"), "--verbose"),
    env: Mapping[str, str] | None = None,
) -> Iterator[Training]:
    (folder / "train.py").write_text(program)
    words = [*run, *options, "--blacklist-cooldown-range", "0.1", "0.2", sys.executable, "train.py"]
    with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
        process = subprocess.Popen(words, cwd=folder, env=env, stdout=out, stderr=err, start_new_session=True)
    try:
        yield Training(folder, process, program != TRAINING)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(PATIENCE)
