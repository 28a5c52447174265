"""Picture of an elastic job: the loss and the number of ranks over time, while ranks are killed and slots come and go.

Runs the elastic example of each framework by `farandole run` and draws their outputs as an SVG."""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path

ROOT = Path(__file__).parents[2]
PICTURE = Path(__file__).with_name("elastic.svg")
# Events in order: a name, a number, and the number of ranks that must have trained for STEPS steps before the event.
# "kill" kills so many ranks, "slots" makes the script of hosts print so many slots, "end" ends the training.
STEPS = 100
EVENTS = (("kill", 1, 3), ("slots", 4, 3), ("kill", 2, 4), ("slots", 2, 4), ("end", 0, 2))
# Frameworks, and the example of each with its options.
EXAMPLES = {
    "PyTorch": ("elastic_torch.py", "--steps"),
    "TensorFlow": ("elastic_tensorflow.py", "--steps"),
    "Keras": ("elastic_keras.py", "--epochs"),
    "JAX": ("elastic_jax.py", "--steps"),
}
PLACE = re.compile(r"\[\d+\] process (\d+) is rank (\d+) of (\d+)\n")
LINE = re.compile(r"\[\d+\] step (\d+): loss ([\d.e-]+), (\d+) ranks\n")
WIDTH, HEIGHT, LEFT, BASE = 720, 240, 50, 205  # of a framework


@dataclass(frozen=True)
class Step:
    """A step of one rank."""

    number: int
    at: float  # seconds since the first one
    size: int
    loss: float


def run(example: str, length: str) -> tuple[list[Step], list[tuple[float, str]]]:
    """Return the steps of a training in which the events happen, each once, and the time and name of each event."""
    steps: list[Step] = []
    events: list[tuple[float, str]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "hosts.sh").write_text("echo localhost:3\n")
        options = ["-np", "3", "--min-np", "1", "--max-np", "4", "--host-discovery-script", str(folder / "hosts.sh")]
        program = [sys.executable, str(ROOT / "examples" / example), length, "1000000", "--pause", "0.02"]
        words = [sys.executable, "-m", "farandole.launch.cli", "run", *options, *program]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(words, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as job:
            assert job.stdout is not None
            pids: dict[int, int] = {}  # by rank
            left, since, begin = list(EVENTS), 0, 0.0
            for line in job.stdout:
                now = time.monotonic()
                if (place := PLACE.fullmatch(line)) is not None:
                    pids[int(place[2])] = int(place[1])
                found = LINE.fullmatch(line)
                if found is None or (steps and int(found[1]) <= steps[-1].number):
                    continue
                number, size, begin = int(found[1]), int(found[3]), begin or now
                since = number if not steps or size != steps[-1].size else since
                steps.append(Step(number, now - begin, size, float(found[2])))
                if left and size == left[0][2] and number >= since + STEPS:
                    kind, count, _ = left.pop(0)
                    events.append((now - begin, _act(kind, count, [pids[rank] for rank in range(size)], folder)))
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


def draw(framework: str, steps: Sequence[Step], events: Sequence[tuple[float, str]]) -> list[str]:
    """Return the parts of a panel: the logarithm of the loss as a line, the ranks as a filled stair."""
    together = [steps[place : place + 6] for place in range(0, len(steps), 6)]
    means = [(each[0].at, sum(step.loss for step in each) / len(each)) for each in together]
    end, highest, lowest = steps[-1].at, max(loss for _, loss in means), min(loss for _, loss in means)

    def x(at: float) -> str:
        return f"{LEFT + at / end * (WIDTH - LEFT - 30):.1f}"

    def ranks(size: int) -> str:
        return f"{BASE - size * 26}"

    stair, before = f"M{x(0)},{BASE}V{ranks(steps[0].size)}", steps[0].size
    for step in steps:
        if step.size != before:
            stair, before = f"{stair}H{x(step.at)}V{ranks(step.size)}", step.size
    loss = " ".join(f"{x(at)},{BASE - log(each / lowest) / log(highest / lowest) * 140:.1f}" for at, each in means)
    numbers = f'x="{LEFT - 8}" text-anchor="end" fill="#5b93c7"'
    parts = [
        f'<text x="{LEFT}" y="14" font-weight="bold">{framework}</text>',
        f'<path d="{stair}H{x(end)}V{BASE}Z" fill="#cfe3f5" stroke="#5b93c7"/>',
        *(f'<text y="{ranks(size)}" dy="4" {numbers}>{size}</text>' for size in range(1, 5)),
        f'<polyline points="{loss}" fill="none" stroke="#b3402a" stroke-width="1.2"/>',
        f'<text x="{LEFT + 90}" y="14" fill="#b3402a">loss, logarithmic, from {highest:.2g} to {lowest:.2g}</text>',
        f'<text y="{ranks(5)}" {numbers}>ranks</text>',
    ]
    for place, (at, what) in enumerate(events):
        parts.append(f'<path d="M{x(at)},{BASE}V{40 + place % 2 * 13}" stroke="#777" stroke-dasharray="3 3"/>')
        parts.append(f'<text x="{x(at)}" y="{35 + place % 2 * 13}" text-anchor="middle" fill="#333">{what}</text>')
    for second in range(0, int(end) + 1, max(1, int(end) // 8)):
        parts.append(f'<text x="{x(second)}" y="{BASE + 18}" text-anchor="middle">{second} s</text>')
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=PICTURE)
    given = parser.parse_args()
    parts: list[str] = []
    for place, (framework, example) in enumerate(EXAMPLES.items()):
        parts += [f'<g transform="translate(0,{place * HEIGHT})">', *draw(framework, *run(*example)), "</g>"]
    height = len(EXAMPLES) * HEIGHT
    form = 'font-family="sans-serif" font-size="12"'
    begin = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {form}>'
    background = f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>'
    given.file.write_text("\n".join([begin, background, *parts, "</svg>", ""]))


if __name__ == "__main__":
    main()
