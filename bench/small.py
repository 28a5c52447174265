"""Small allreduces measured in another way: back to back, and by the function that `hvd.bind` returns.

Part of allreduce.py, where each operation ends with its last rank."""

import time
from collections.abc import Callable, Mapping

import peers
import torch
from comparison import KIB, OURS, Line, compare, limit, size_text
from peers import BenchRank, Contender, Times
from race import Race

import farandole.torch as hvd
from farandole.core import default
from farandole.core.context import Context

__all__ = ["lines_of", "measure"]

BOUND, BACK_TO_BACK = "bound", "back to back"
BOUND_LIMIT_US = 0.7
SIZES, REPEATS = (4, KIB), 1000


def measure(
    bench: BenchRank,
    context: Context,
    contenders_of: Callable[..., dict[str, Contender]],
    rounds: int,
    repeats: int,
) -> dict[str, Times]:
    """Measure our contender and a bound call; `contenders_of` is `Field.allreduce`.

    Without gloo, which allreduce.py compares, and whose thousand operations would take most of the time."""
    results: dict[str, Times] = {}
    for size in SIZES:
        title = f"allreduce {size_text(size)} float32"
        contenders = contenders_of(size, torch.float32, adds=False)
        del contenders["gloo"]
        results[f"{title} {BACK_TO_BACK}"] = back_to_back(bench, contenders, rounds)
        contenders = {**contenders, OURS: bound(bench, context, size)}
        results[f"{BOUND} {title}"] = peers.take_turns(bench, contenders, rounds, repeats)
        results[f"{BOUND} {title} {BACK_TO_BACK}"] = back_to_back(bench, contenders, rounds)
    return results


def bound(bench: BenchRank, context: Context, size: int) -> Contender:
    """Return a contender that sums `size` bytes by one bound function."""
    total, tensor = bench.size * (bench.size + 1) // 2, torch.empty(size // 4)
    with default.use(context):
        run = hvd.bind(tensor, name=f"{BOUND}.{size}", op=hvd.Sum)
    return Contender(run, lambda: tensor.fill_(bench.rank + 1), lambda: bool((tensor == total).all()), context)


def back_to_back(bench: BenchRank, contenders: Mapping[str, Contender], rounds: int) -> Times:
    """Run many operations of each contender per round without a pause; the order rotates from round to round.

    A round's time is the mean of the slowest rank, so a rank may begin its next operation before others have left the
    one before."""
    names, clock = list(contenders), time.perf_counter_ns
    times: Times = {name: [] for name in names}
    for number in range(rounds + 1):  # the first round warms up
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            contender = contenders[name]
            run = contender.run
            with peers.within(contender.context):
                contender.refresh()
                bench.barrier()
                begin = clock()
                for _ in range(REPEATS):
                    run()
                taken = (clock() - begin) // REPEATS
            if number > 0:
                times[name].append([(0, taken)])
    return times


def lines_of(title: str, race: Race) -> list[Line]:
    """Return the lines of a race of `measure` between two ranks."""
    lines = compare(title, race, {"Open MPI": 1})
    return [*lines, limit(title, race, BOUND_LIMIT_US)] if title.startswith(BOUND) else lines
