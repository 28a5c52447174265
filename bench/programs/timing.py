"""Clock of the programs: seconds and losses of their steps, and the share of time in which gloo's operations run."""

import json
import statistics
import sys
import time
from itertools import pairwise

import torch

PREFIX = "doors: "  # of the line with the results


class Steps:
    """Steps of one rank: `warm` that do not count, `counted`, and `profiled` below torch's profiler.

    `done` is called at the end of each step; after the last one rank 0 prints a line with the results."""

    def __init__(self, warm: int = 5, counted: int = 30, profiled: int = 10) -> None:
        self.losses: list[float] = []
        self._warm, self._end, self.total = warm, warm + counted, warm + counted + profiled
        self._ends: list[float] = []
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])

    def done(self, loss: float) -> None:
        """Note the end of a step and its loss on this rank."""
        self._ends.append(time.perf_counter())
        self.losses.append(loss)
        if len(self._ends) == self._end:
            self._profile.start()
        if len(self._ends) == self.total:
            self._profile.stop()
            self._print()

    def _print(self) -> None:
        counted = self._ends[self._warm - 1 : self._end]
        seconds = statistics.median(after - before for before, after in pairwise(counted))
        found = {"seconds": seconds, "losses": self.losses, "share": self._share()}
        if torch.distributed.get_rank() == 0:
            sys.stdout.write(f"{PREFIX}{json.dumps(found)}\n")
            sys.stdout.flush()

    def _share(self) -> float:
        """Return the share of the profiled time in which at least one operation of the process group was under way."""
        events = self._profile.events()
        covered, until = 0.0, 0.0
        operations = [event.time_range for event in events if event.name.startswith("gloo:")]
        for begin, end in sorted((each.start, each.end) for each in operations):
            covered += max(0.0, end - max(begin, until))
            until = max(until, end)
        begins, ends = zip(*((each.time_range.start, each.time_range.end) for each in events), strict=True)
        return covered / (max(ends) - min(begins))
