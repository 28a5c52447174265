"""Picture of an elastic job: the loss and the number of ranks over time, while ranks are killed and slots come and go.

Runs a small training by `farandole run` and draws its output as an SVG."""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path

PICTURE = Path(__file__).with_name("elastic.svg")
# Events in order: a name, a number, and the number of ranks that must have trained for STEPS steps before the event.
# "kill" kills so many ranks, "slots" makes the script of hosts print so many slots, "end" ends the training.
STEPS = 100
EVENTS = (("kill", 1, 3), ("slots", 4, 3), ("kill", 2, 4), ("slots", 2, 4), ("end", 0, 2))
PROGRAM = """
import os, time, torch
import farandole.torch as hvd
from farandole.torch import elastic
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
hvd.init()
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
@elastic.run
def train(state):
    while True:
        rows = torch.randn(240, 8, generator=torch.Generator().manual_seed(state.step))[hvd.rank()::hvd.size()]
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(rows), rows.prod(1, keepdim=True).tanh() + rows.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        state.step += 1
        state.commit()
        print("step", state.step, time.monotonic(), hvd.size(), loss.item(), os.getpid(), flush=True)
        time.sleep(0.02)
train(elastic.TorchState(model, optimizer, copies=False, step=0))
"""
LINE = re.compile(r"\[\d+\] step (\d+) ([\d.]+) (\d+) ([\d.e-]+) (\d+)\n")
WIDTH, HEIGHT, LEFT, BASE = 720, 300, 50, 260


@dataclass(frozen=True)
class Step:
    """A step of one rank."""

    number: int
    at: float  # seconds since the first one
    size: int
    loss: float


def run() -> tuple[list[Step], list[tuple[float, str]]]:
    """Return the steps of a training in which the events happen, each once, and the time and name of each event."""
    steps: list[Step] = []
    events: list[tuple[float, str]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(PROGRAM)
        (folder / "hosts.sh").write_text("echo localhost:3\n")
        options = ["-np", "3", "--min-np", "1", "--max-np", "4", "--host-discovery-script", str(folder / "hosts.sh")]
        words = [sys.executable, "-m", "farandole.launch.cli", "run", *options, sys.executable, "train.py"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(words, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as job:
            assert job.stdout is not None
            pids: dict[str, int] = {}
            left, since, begin = list(EVENTS), 0, 0.0
            for found in filter(None, map(LINE.fullmatch, job.stdout)):
                number, now, size = int(found[1]), float(found[2]), int(found[3])
                begin = begin or now
                pids[found[5]] = number
                if steps and number <= steps[-1].number:
                    continue
                since = number if not steps or size != steps[-1].size else since
                steps.append(Step(number, now - begin, size, float(found[4])))
                if left and size == left[0][2] and number >= since + STEPS:
                    kind, count, _ = left.pop(0)
                    alive = [int(pid) for pid, last in pids.items() if last > number - 5]
                    events.append((now - begin, _act(kind, count, alive, folder)))
                    since = number
                    if not left:
                        job.terminate()
    return steps, events


def _act(kind: str, count: int, alive: Sequence[int], folder: Path) -> str:
    """Kill `count` ranks, or offer so many slots; return the event's name."""
    if kind == "end":
        return "end"
    if kind == "kill":
        for victim in alive[:count]:
            os.kill(victim, signal.SIGKILL)
        return f"kill -9 of {count}"
    (folder / "new").write_text(f"echo localhost:{count}\n")
    (folder / "new").rename(folder / "hosts.sh")
    return f"{count} slots"


def draw(steps: Sequence[Step], events: Sequence[tuple[float, str]]) -> str:
    """Return the SVG: the logarithm of the loss as a line, the ranks as a filled stair."""
    together = [steps[place : place + 6] for place in range(0, len(steps), 6)]
    means = [(each[0].at, sum(step.loss for step in each) / len(each)) for each in together]
    end, highest, lowest = steps[-1].at, max(loss for _, loss in means), min(loss for _, loss in means)

    def x(at: float) -> str:
        return f"{LEFT + at / end * (WIDTH - LEFT - 30):.1f}"

    def ranks(size: int) -> str:
        return f"{BASE - size * 30}"

    stair, before = f"M{x(0)},{BASE}V{ranks(steps[0].size)}", steps[0].size
    for step in steps:
        if step.size != before:
            stair, before = f"{stair}H{x(step.at)}V{ranks(step.size)}", step.size
    loss = " ".join(f"{x(at)},{BASE - log(each / lowest) / log(highest / lowest) * 190:.1f}" for at, each in means)
    form = 'font-family="sans-serif" font-size="12"'
    numbers = f'x="{LEFT - 8}" text-anchor="end" fill="#5b93c7"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {form}>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<path d="{stair}H{x(end)}V{BASE}Z" fill="#cfe3f5" stroke="#5b93c7"/>',
        *(f'<text y="{ranks(size)}" dy="4" {numbers}>{size}</text>' for size in range(1, 5)),
        f'<polyline points="{loss}" fill="none" stroke="#b3402a" stroke-width="1.2"/>',
        f'<text x="{LEFT}" y="20" fill="#b3402a">loss, logarithmic, from {highest:.2g} to {lowest:.2g}</text>',
        f'<text y="{ranks(5)}" {numbers}>ranks</text>',
    ]
    for place, (at, what) in enumerate(events):
        parts.append(f'<path d="M{x(at)},{BASE}V{52 + place % 2 * 14}" stroke="#777" stroke-dasharray="3 3"/>')
        parts.append(f'<text x="{x(at)}" y="{46 + place % 2 * 14}" text-anchor="middle" fill="#333">{what}</text>')
    for second in range(0, int(end) + 1, max(1, int(end) // 8)):
        parts.append(f'<text x="{x(second)}" y="{BASE + 18}" text-anchor="middle">{second} s</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=PICTURE)
    given = parser.parse_args()
    given.file.write_text(draw(*run()))


if __name__ == "__main__":
    main()
