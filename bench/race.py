"""Races: contenders measured in turn, so that other load of the machine slows all equally; and results as JSON."""

import json
import os
import platform
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

RESULTS = Path(__file__).with_name("results")


@dataclass(frozen=True, slots=True)
class Spread:
    """Minimum, median and maximum of measurements."""

    min: float
    median: float
    max: float

    def __str__(self) -> str:
        return f"{self.min:.3f} / {self.median:.3f} / {self.max:.3f}"


@dataclass(frozen=True, slots=True)
class Race:
    """Seconds of each contender by round."""

    seconds: dict[str, list[float]]

    def ratios(self, ours: str) -> dict[str, list[float]]:
        """Return each other contender's seconds divided by those of `ours` in the same round."""
        mine = self.seconds[ours]
        return {
            name: [their / our for their, our in zip(theirs, mine, strict=True)]
            for name, theirs in self.seconds.items()
            if name != ours
        }

    def report(self) -> str:
        """Return a line with min / median / max for each contender, and for its ratio to the first one."""
        first = next(iter(self.seconds))
        lines = [f"  {name:<32} {spread(values)} s" for name, values in self.seconds.items()]
        lines += [f"  {f'{name} : {first}':<32} {spread(values)}" for name, values in self.ratios(first).items()]
        return "\n".join(lines)


def spread(values: Sequence[float]) -> Spread:
    """Return minimum, median and maximum."""
    return Spread(min(values), statistics.median(values), max(values))


def race(contenders: Mapping[str, Callable[[], float]], rounds: int) -> Race:
    """Call each contender, which returns its seconds, once per round, in another order each. The first is farandole.

    In a fixed order, processes that a contender leaves behind would always slow the same one. An additional first round
    warms caches and does not count."""
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        for name in random.Random(number).sample(names, len(names)):
            taken = contenders[name]()
            if number > 0:
                seconds[name].append(taken)
    return Race(seconds)


def record(name: str, races: Mapping[str, Race], packages: Sequence[str], lines: Sequence[object] = ()) -> Path:
    """Write all measurements with the machine and the versions of `packages`; return the file's path.

    `lines` are comparisons (dataclasses), of which `summary.py` makes one table."""
    machine = platform.node()
    path = RESULTS / f"{time.strftime('%Y%m%d-%H%M%S')}-{machine}-{name}.json"
    content = {
        "name": name,
        "machine": {
            "host": machine,
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)),
            "kernel": platform.release(),
            "load": os.getloadavg(),
            "between_cores": _between_cores(),
        },
        "python": sys.version.split()[0],
        "packages": {each: _version(each) for each in packages},
        "races": {title: asdict(each) for title, each in races.items()},
        "lines": [asdict(each) for each in lines],  # type: ignore[call-overload]
    }
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return path


def _processor() -> str:
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    return found[1] if found else platform.processor()


def _between_cores() -> list[str]:
    """Return what tools/bench.sh has measured on this machine by native_cores, nothing if it has not run."""
    measured = RESULTS.parents[1] / "build" / "bench" / "cores.txt"
    return measured.read_text(encoding="utf-8").splitlines() if measured.exists() else []


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
