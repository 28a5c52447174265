"""Gain of autotuning, from the default setting and from a bad one, for few large and for many small tensors.

    python bench/autotune.py [--rounds 6]

Two shapes of a training step run on two ranks of one host and on four ranks of two hosts (over TCP). One job tunes from
the default setting, another from a bad setting that the log of an earlier job contains. Then each job trains with the
tuned, the default and the bad setting in turns. A ratio compares measurements of one turn: how many times faster the
tuned setting is. If the search has kept the default, the ratio to the default compares two equal settings and shows the
noise; if not, the tuned setting must not be slower than the default, but for noise. Prints one table and writes
bench/results/*-autotune.json."""

import argparse
import itertools
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from comparison import KIB, MIB, OURS, Line, compare, table
from race import Race, record

sys.path.append(str(Path(__file__).parent.parent / "tests"))

import farandole.numpy as hvd
from farandole.config import Config
from farandole.core.autotune.knobs import Knobs
from farandole.core.autotune.tuning_log import Row, TuningLog
from farandole.core.context import Context
from helpers.ranks import run_ranks

SHAPES = {"few large, 4 x 4 MiB": [4 * MIB] * 4, "many small, 300 x 8 KiB": [8 * KIB] * 300}
WORLDS = {"2 ranks, 1 host": (2, 1), "4 ranks, 2 hosts": (4, 2)}
DEFAULT = Knobs.of(Config())
BAD = replace(DEFAULT, fusion_threshold=64 * KIB, slot_bytes=16 * KIB, link_chunk=32 * KIB, link_small=4 * KIB)
SECONDS = 0.5  # of one measurement
PATIENCE = 120.0  # seconds for one search
MUST = {"default": 0.95}


@dataclass(frozen=True)
class Found:
    """Result of one job: the tuned knobs, the number of turns, and the seconds of a step by setting and turn."""

    knobs: Knobs
    samples: int
    seconds: dict[str, list[float]]


class Training:
    """One rank's training: each step submits its gradients one by one, then waits for all."""

    def __init__(self, context: Context, sizes: list[int]) -> None:
        self._context = context
        self._tensors = [np.zeros(size // 4, np.float32) for size in sizes]

    def run_until(self, over: Callable[[], bool]) -> float:
        """Train until `over()` is true on rank 0; return the seconds per step."""
        begin, steps, word = time.perf_counter(), 0, np.zeros(1)
        while not word[0]:
            for _ in range(4):
                self._step()
            steps += 4
            word[0] = float(self._context.rank == 0 and over())
            word = hvd.allreduce(word, name="over", op=hvd.Max)
        return (time.perf_counter() - begin) / steps

    def run_with(self, knobs: Knobs) -> float:
        """Train with `knobs`: four steps as warm-up, then `SECONDS` seconds; return the seconds per step."""
        if self._context.rank == 0:
            self._context.engine.turn(knobs.for_engine(), False)
        self.run_until(lambda: True)
        end = time.perf_counter() + SECONDS
        return self.run_until(lambda: time.perf_counter() >= end)

    def _step(self) -> None:
        handles = [hvd.allreduce_async_(each, name=f"g{at}", op=hvd.Sum) for at, each in enumerate(self._tensors)]
        for handle in handles:
            hvd.synchronize(handle)


def rank_of_job(context: Context, sizes: list[int], rounds: int) -> Found:
    """Train until the search is over, then with each setting in turns; return the result of this rank."""
    training = Training(context, sizes)
    end = time.monotonic() + PATIENCE

    def is_over() -> bool:
        if time.monotonic() > end:
            raise TimeoutError(f"no result within {PATIENCE:g} s")
        return "farandole-tuner" not in {thread.name for thread in threading.enumerate()}

    training.run_until(is_over)
    tuned = Knobs.of_engine(context.engine.tuned()[0])
    settings = {OURS: tuned, "default": DEFAULT, "bad": BAD}
    seconds: dict[str, list[float]] = {name: [] for name in settings}
    # Permutations: each setting follows each other equally often. After the bad setting, threads have rested.
    for _, order in zip(range(rounds), itertools.cycle(itertools.permutations(settings)), strict=False):
        for name in order:
            seconds[name].append(training.run_with(settings[name]))
    return Found(tuned, int(hvd.metrics()["knob_turns"]) - 3 * rounds, seconds)


def run_job(ranks: int, hosts: int, sizes: list[int], saved: Knobs | None, rounds: int) -> Found:
    """Run a job whose ranks are threads, with the search starting at `saved`; return rank 0's result."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "log.csv")
        if saved is not None:
            with TuningLog(path) as log:
                log.add(Row("chosen", ranks, hosts, saved, 1.0))
        config = Config(autotune=True, autotune_log=path)
        limit = 2 * PATIENCE + 30.0 * rounds  # seconds
        return run_ranks(ranks, rank_of_job, sizes, rounds, timeout=limit, config=config, hosts=hosts)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    rounds = parser.parse_args().rounds
    races: dict[str, Race] = {}
    lines: list[Line] = []
    for world, (ranks, hosts) in WORLDS.items():
        for shape, sizes in SHAPES.items():
            for begin, saved in {"default": None, "bad": BAD}.items():
                found = run_job(ranks, hosts, sizes, saved, rounds)
                kept = ", kept" if found.knobs == DEFAULT else ""
                what = f"{world}; {shape}; from {begin}{kept}"
                races[what] = Race(found.seconds)
                lines += compare(what, races[what], {} if kept else MUST)
                sys.stdout.write(f"{what}: {found.samples} turns, {found.knobs}\n")
                sys.stdout.flush()
    sys.stdout.write(f"{table('tuned, against the default and a bad setting; us per step', lines)}\n")
    sys.stdout.write(f"{record('autotune', races, ('farandole', 'optuna', 'numpy'), lines)}\n")


if __name__ == "__main__":
    main()
