"""Cost of many small tensors: 200 of 4 KiB, as one group, one by one, and of mixed types.

    python bench/fusion.py [--full] [--rounds 5]

The peers are gloo (packed into one tensor; coalesced; one by one) and MPI (packed; one by one). The mix has alternating
runs of float16 and float32 tensors. It is measured with fusion that looks ahead past tensors of the other type, with
look-ahead switched off in the engine, and without fusion. Prints one table and writes bench/results/*-fusion.json."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from unittest import mock

import numpy as np
import peers
import torch
import torch.distributed as dist
from comparison import KIB, OURS, Line, compare, limit, table
from peers import BenchRank, Contender, Times
from race import Race, record

import farandole.torch as hvd
from farandole._native import Engine
from farandole.config import Config
from farandole.core.context import Context

TENSORS, TENSOR_BYTES, RUN = 200, 4 * KIB, 5
GROUPED, SINGLY = f"{TENSORS} x 4 KiB grouped", f"{TENSORS} x 4 KiB singly, then waited for"
MIXED, MIXED_TCP = f"{TENSORS} x 4 KiB, runs of {RUN} of a type", f"tcp: {TENSORS} x 4 KiB, runs of {RUN} of a type"
PACKED, COALESCED, EACH = "gloo packed", "gloo coalesced", "gloo async"
SHORT_SIGHTED, UNFUSED = "look-ahead off", "no fusion"
MUST: Mapping[str, Mapping[str, float]] = {
    GROUPED: {PACKED: 10, "Open MPI packed": 2},
    SINGLY: {EACH: 100},
    # Horovod claims +26 % for look-ahead.
    MIXED: {SHORT_SIGHTED: 1.26},
    MIXED_TCP: {SHORT_SIGHTED: 1.26},
}
LIMIT_US = {GROUPED: 90.0, SINGLY: 300.0}


class Tensors:
    """The tensors of a step, and their names."""

    def __init__(self, bench: BenchRank, dtypes: Sequence[torch.dtype], prefix: str) -> None:
        self.values = [torch.empty(TENSOR_BYTES // dtype.itemsize, dtype=dtype) for dtype in dtypes]
        self.names = [f"{prefix}.{place}" for place in range(len(dtypes))]
        self._mine, self._sum = bench.rank + 1, bench.size * (bench.size + 1) // 2

    def refresh(self) -> None:
        for value in self.values:
            value.fill_(self._mine)

    def right(self) -> bool:
        return all(bool((value == self._sum).all()) for value in self.values)

    def contender(self, run: Callable[[], object], context: Context | None = None) -> Contender:
        return Contender(run, self.refresh, self.right, context)

    def singly(self) -> None:
        """Submit the tensors one by one, in order, then wait for all."""
        handles = [
            hvd.allreduce_async_(value, name=name, op=hvd.Sum)
            for value, name in zip(self.values, self.names, strict=True)
        ]
        for handle in handles:
            hvd.synchronize(handle)


def of_one_type(bench: BenchRank, context: Context) -> dict[str, dict[str, Contender]]:
    """Return the contenders that submit tensors of one type, as a group and singly."""
    tensors = Tensors(bench, [torch.float32] * TENSORS, "sum")
    values, packed = tensors.values, torch.empty(TENSORS * TENSOR_BYTES // 4)

    def gloo_packed() -> None:
        torch.cat(values, out=packed)
        dist.all_reduce(packed)
        torch._foreach_copy_(values, list(packed.split(TENSOR_BYTES // 4)))

    def gloo_each() -> None:
        works = [dist.all_reduce(value, async_op=True) for value in values]
        for work in works:
            assert work is not None
            work.wait()

    grouped = {
        OURS: tensors.contender(lambda: hvd.grouped_allreduce_(values, name="group", op=hvd.Sum), context),
        PACKED: tensors.contender(gloo_packed),
        COALESCED: tensors.contender(lambda: dist.all_reduce_coalesced(values)),
    }
    singly = {OURS: tensors.contender(tensors.singly, context), EACH: tensors.contender(gloo_each)}
    if bench.has_mpi:
        mpi = bench.mpi()
        arrays, whole = [value.numpy() for value in values], packed.numpy()
        views = np.split(whole, TENSORS)

        def mpi_packed() -> None:
            np.concatenate(arrays, out=whole)
            mpi.COMM_WORLD.Allreduce(mpi.IN_PLACE, whole)
            for array, view in zip(arrays, views, strict=True):
                np.copyto(array, view)

        def mpi_each() -> None:
            for array in arrays:
                mpi.COMM_WORLD.Allreduce(mpi.IN_PLACE, array)

        grouped[f"{bench.launcher} packed"] = tensors.contender(mpi_packed)
        singly[f"{bench.launcher}, one call each"] = tensors.contender(mpi_each)
    return {GROUPED: grouped, SINGLY: singly}


def mixed(bench: BenchRank, contexts: Mapping[str, Context]) -> dict[str, Contender]:
    """Return a contender for each context; all submit the same sequence of types."""
    dtypes = [(torch.float16, torch.float32)[place // RUN % 2] for place in range(TENSORS)]
    tensors = Tensors(bench, dtypes, "mixed")
    return {name: tensors.contender(tensors.singly, context) for name, context in contexts.items()}


@contextmanager
def engines(*, look_ahead: bool) -> Iterator[None]:
    """Make contexts in this block with engines with or without look-ahead, for which users have no setting."""
    with mock.patch("farandole.core.wiring.start.Engine", partial(Engine, look_ahead=look_ahead)):
        yield


def measure(bench: BenchRank) -> dict[str, Times]:
    """Measure as one rank; return the times by title and contender."""
    rounds, repeats = int(str(bench.options["rounds"])), int(str(bench.options["repeats"]))
    full = Config().fusion_threshold
    kinds = {OURS: (full, True), SHORT_SIGHTED: (full, False), UNFUSED: (0, True)}
    results: dict[str, Times] = {}
    with ExitStack() as stack:
        stack.enter_context(bench.gloo())
        contexts: dict[bool, dict[str, Context]] = {False: {}, True: {}}
        for hosts, made in contexts.items():
            for name, (threshold, look_ahead) in kinds.items():
                config = Config.from_environment(fusion_threshold=threshold)
                place = f"{'tcp' if hosts else 'memory'}-{threshold}-{look_ahead}"
                with engines(look_ahead=look_ahead):
                    made[name] = stack.enter_context(bench.context(place, config, hosts=hosts))
        fields = of_one_type(bench, contexts[False][OURS])
        fields |= {MIXED: mixed(bench, contexts[False]), MIXED_TCP: mixed(bench, contexts[True])}
        for title, contenders in fields.items():
            # gloo takes a hundred times longer than the others for tensors one by one.
            results[title] = peers.take_turns(bench, contenders, rounds, repeats if EACH not in contenders else 3)
    return results


def main() -> None:
    given = peers.arguments(__doc__).parse_args()
    options = {"rounds": given.rounds, "repeats": 100 if given.full else 20}
    races: dict[str, Race] = {}
    lines: list[Line] = []
    for launcher in peers.usable(["Open MPI", "MPICH"]):
        for title, race in peers.races_of(peers.run_ranks(__file__, 2, launcher, options)).items():
            races[f"{launcher.name}: {title}"] = race
            what = f"{title} ({launcher.name} run)"
            lines += compare(what, race, MUST[title])
            if title in LIMIT_US:
                lines.append(limit(what, race, LIMIT_US[title]))
    sys.stdout.write(f"{table('many small tensors, 2 ranks', lines)}\n")
    sys.stdout.write(f"{record('fusion', races, ('farandole', 'torch', 'mpi4py', 'mpich'), lines)}\n")


if __name__ == "__main__":
    bench = peers.bench_rank_of(sys.argv)
    if bench is None:
        main()
    else:
        bench.leave(measure(bench))
