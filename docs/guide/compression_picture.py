"""Picture of training by each compression: the accuracy on handwritten digits, and the loss of a small language model.

Trains both on two ranks, three times each, and draws the means as an SVG. The text is Python's own documentation.
Prints the results at the end, with the range over the three seeds."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from pydoc_data.topics import topics

import torch
from sklearn.datasets import load_digits

import farandole.torch as hvd

PICTURE = Path(__file__).with_name("compression.svg")
RANKS, SEEDS = 2, 3
Wrap = Callable[[torch.optim.Optimizer, torch.nn.Module], torch.optim.Optimizer]
Curve = list[tuple[int, float]]  # a step and a value


def compressed(compression: object) -> Wrap:
    """Return a way to train: gradients by `compression`."""
    return lambda optimizer, model: hvd.DistributedOptimizer(
        optimizer,
        model.named_parameters(),
        compression=compression,  # type: ignore[arg-type]
    )


WAYS: Mapping[str, tuple[Wrap, str]] = {
    "float32": (compressed(hvd.Compression.none), "#222"),
    "fp16": (compressed(hvd.Compression.fp16), "#5b93c7"),
    "bf16": (compressed(hvd.Compression.bf16), "#2e9e8f"),
    "int8": (compressed(hvd.Compression.int8), "#b3402a"),
    "PowerSGD, rank 4": (compressed(hvd.PowerSGD(4)), "#8a5bb5"),
    "LocalSGD, 8 steps": (lambda optimizer, model: hvd.LocalSGD(optimizer, sync_every=8), "#c98a1b"),
    "DiLoCo, 16 steps": (lambda optimizer, model: hvd.DiLoCo(optimizer, sync_every=16), "#6a8f2b"),
}


class Digits:
    """Classification of 1797 images of 8 x 8 pixels; a curve is the accuracy on 297 others, in percent."""

    title, steps, every = "digits: accuracy, %", 400, 20

    def __init__(self) -> None:
        images, labels = load_digits(return_X_y=True)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
        self.images, self.labels = torch.tensor(images).float()[order] / 16, torch.tensor(labels)[order]

    def model(self) -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Linear(64, 128),
            torch.nn.ReLU(),
            torch.nn.Linear(128, 128),
            torch.nn.ReLU(),
            torch.nn.Linear(128, 10),
        )

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def loss(self, model: torch.nn.Module, random: torch.Generator) -> torch.Tensor:
        rows = torch.randint(0, 1500, (32,), generator=random)
        return torch.nn.functional.cross_entropy(model(self.images[rows]), self.labels[rows])

    def value(self, model: torch.nn.Module) -> float:
        return 100 * (model(self.images[1500:]).argmax(1) == self.labels[1500:]).float().mean().item()


class Characters(torch.nn.Module):
    """Language model of characters."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(letters, 32)
        self.hidden = torch.nn.GRU(32, 96, batch_first=True)
        self.letter = torch.nn.Linear(96, letters)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the scores of the letter after each one."""
        scores: torch.Tensor = self.letter(self.hidden(self.embedding(text))[0])
        return scores


class Language:
    """Prediction of the next character of Python's documentation; a curve is the loss on its last part, in nats."""

    title, steps, every, length = "characters: loss, nats", 400, 20, 48

    def __init__(self) -> None:
        text = "".join(topics[name] for name in sorted(topics))
        letters = {letter: place for place, letter in enumerate(sorted(set(text)))}
        self.text, self.letters = torch.tensor([letters[letter] for letter in text]), len(letters)
        self.most = len(self.text) * 9 // 10

    def model(self) -> torch.nn.Module:
        return Characters(self.letters)

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.004)

    def loss(self, model: torch.nn.Module, random: torch.Generator) -> torch.Tensor:
        return self._loss(model, torch.randint(0, self.most - self.length, (8,), generator=random))

    def value(self, model: torch.nn.Module) -> float:
        return self._loss(model, torch.arange(self.most, len(self.text) - self.length - 1, 16 * self.length)).item()

    def _loss(self, model: torch.nn.Module, begins: torch.Tensor) -> torch.Tensor:
        rows = self.text[begins[:, None] + torch.arange(self.length + 1)]
        return torch.nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


Task = Digits | Language


def train(task: Task, wrap: Wrap, seed: int) -> Iterator[tuple[int, float]]:
    """Train as one rank; yield steps and values of the model of all ranks."""
    torch.manual_seed(seed)
    model = task.model()
    optimizer = wrap(task.optimizer(model), model)
    random = torch.Generator().manual_seed(1000 * seed + hvd.rank())
    for step in range(1, task.steps + 1):
        optimizer.zero_grad()
        task.loss(model, random).backward()
        optimizer.step()
        if step % task.every == 0:
            with torch.no_grad():
                # Between exchanges of LocalSGD and DiLoCo the ranks differ.
                mine = [parameter.clone() for parameter in model.parameters()]
                for parameter, mean in zip(model.parameters(), hvd.grouped_allreduce(mine), strict=True):
                    parameter.copy_(mean)
                value = task.value(model)
                for parameter, kept in zip(model.parameters(), mine, strict=True):
                    parameter.copy_(kept)
            yield step, value


def work(file: Path) -> None:
    """Train everything as one rank; rank 0 writes the curves."""
    hvd.init()
    torch.set_num_threads(1)
    found = {
        task.title: {name: [list(train(task, wrap, seed)) for seed in range(SEEDS)] for name, (wrap, _) in WAYS.items()}
        for task in (Digits(), Language())
    }
    if hvd.rank() == 0:
        file.write_text(json.dumps(found))
    hvd.shutdown()


WIDTH, HEIGHT, LEFT, TOP, BASE, PANEL = 900, 330, 60, 40, 280, 320


def draw(found: Mapping[str, Mapping[str, list[Curve]]]) -> str:
    """Return the SVG: a panel of curves for each task, and one legend."""
    form = 'font-family="sans-serif" font-size="12"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {form}>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
    ]
    for place, (title, ways) in enumerate(found.items()):
        parts += panel(LEFT + place * (PANEL + 50), title, {name: mean(curves) for name, curves in ways.items()})
    for place, (name, (_, colour)) in enumerate(WAYS.items()):
        y = TOP + 20 * place
        parts.append(f'<path d="M{WIDTH - 140},{y}h20" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{WIDTH - 112}" y="{y + 4}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def mean(curves: Sequence[Curve]) -> Curve:
    """Return the mean of curves over the same steps."""
    return [(points[0][0], sum(value for _, value in points) / len(points)) for points in zip(*curves, strict=True)]


def panel(left: int, title: str, curves: Mapping[str, Curve]) -> Iterator[str]:
    """Yield the parts of one panel; the scale leaves out the first quarter of the steps, in which curves are steep."""
    steps = max(step for step, _ in curves["float32"])
    late = [value for curve in curves.values() for step, value in curve if 4 * step > steps]
    low, high = min(late), max(late)

    def y(value: float) -> float:
        return BASE - (value - low) / (high - low) * (BASE - TOP)

    yield f'<path d="M{left},{TOP}V{BASE}H{left + PANEL}" fill="none" stroke="#777"/>'
    yield f'<text x="{left}" y="{TOP - 16}">{title}</text>'
    for part in range(5):
        value, step = low + (high - low) * part / 4, steps * part // 4
        yield f'<text x="{left - 8}" y="{y(value) + 4:.1f}" text-anchor="end" fill="#555">{value:.3g}</text>'
        yield f'<text x="{left + PANEL * part / 4:.1f}" y="{BASE + 18}" text-anchor="middle" fill="#555">{step}</text>'
    yield f'<text x="{left + PANEL}" y="{BASE + 36}" text-anchor="end" fill="#555">steps</text>'
    for name, curve in curves.items():
        points = " ".join(
            f"{left + PANEL * step / steps:.1f},{y(value):.1f}" for step, value in curve if low <= value <= high
        )
        yield f'<polyline points="{points}" fill="none" stroke="{WAYS[name][1]}" stroke-width="1.4"/>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=PICTURE)
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.as_rank:
        work(given.file)
        return
    with tempfile.TemporaryDirectory() as folder:
        curves = Path(folder, "curves.json")
        words = [sys.executable, "-m", "farandole.launch.cli", "run", "-np", str(RANKS)]
        words += [sys.executable, __file__, "--as-rank", str(curves)]
        subprocess.run(words, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        found = json.loads(curves.read_text())
    given.file.write_text(draw(found))
    for title, ways in found.items():
        for name, each in ways.items():
            last = sorted(curve[-1][1] for curve in each)
            sys.stdout.write(f"{title} | {name} | {sum(last) / len(last):.4g} | {last[0]:.4g} to {last[-1]:.4g}\n")


if __name__ == "__main__":
    main()
