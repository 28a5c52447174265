"""Session of pytest whose ranks are the processes of one mpirun, with MPI as their fabric.

All processes collect and run the same tests. `run_ranks` runs the body on the first `size` processes, and each process
gets all results."""

import contextlib
import dataclasses
import math
import pickle
import sys
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import TypeVar

import pytest

import helpers.ranks
from farandole.config import Config
from farandole.core.context import Context
from farandole.core.default import use
from farandole.meeting.handshake import new_secret
from farandole.meeting.launched import find_rendezvous
from farandole.meeting.rendezvous import Rendezvous, TcpRendezvous
from farandole.meeting.server import RendezvousServer
from helpers.leaks import Snapshot
from helpers.outcomes import Outcome, RanksFailed

T = TypeVar("T")
_all_leaks = Snapshot.leaks


class MpiRanks:
    """Runner of bodies on the processes that `session` connects."""

    def __init__(self, session: Rendezvous) -> None:
        self._session = session

    def run_ranks(
        self,
        size: int,
        body: Callable[..., T],
        *args: object,
        timeout: float = 90.0,
        how: str = "threads",
        config: Config | None = None,
        dies: Collection[int] = (),
        hosts: int = 1,
        framework: str | None = None,
    ) -> list[T]:
        """Run a body as `helpers.ranks.run_ranks` does; skip a test that needs more or separate processes."""
        if size > self._session.size:
            pytest.skip(f"needs {size} processes, and mpirun has started {self._session.size}")
        if how == "processes" or dies:
            pytest.skip("needs processes that may end, and these run more tests")
        limit = timedelta(seconds=timeout)
        with contextlib.ExitStack() as stack:
            card = b""
            if self._session.rank == 0:
                secret = new_secret()
                server = stack.enter_context(RendezvousServer(size, secret))
                card = secret + server.address.encode()
            card = self._session.allgather(card, timeout=limit)[0]
            outcome = None
            if self._session.rank < size:
                met = TcpRendezvous(card[32:].decode(), self._session.rank, size, card[:32])
                own = dataclasses.replace(config or Config(), fabric="mpi")
                host = None if hosts == 1 else f"host {self._session.rank % hosts}"
                outcome = _live(met, own, host, lambda context: body(context, *args))
            packed = [each for each in self._session.allgather(pickle.dumps(outcome), timeout=limit) if each]
        outcomes: list[Outcome] = [each for each in map(pickle.loads, packed) if each is not None]
        failures = sorted((each for each in outcomes if each.failed), key=lambda each: each.at)
        if failures:
            raise RanksFailed(size, failures)
        return [each.value for each in outcomes]  # type: ignore[misc]


def _live(met: TcpRendezvous, config: Config, host: str | None, body: Callable[[Context], object]) -> Outcome:
    failed_at = math.inf
    try:
        with contextlib.closing(met), Context(met, config, host=host) as context, use(context):
            try:
                return Outcome(rank=met.rank, value=body(context))
            except BaseException:
                failed_at = time.monotonic()  # before the context ends, which makes the other ranks fail too
                raise
    except BaseException as error:
        outcome = Outcome.of_error(met.rank, error, min(failed_at, time.monotonic()))
        return dataclasses.replace(outcome, error=None)


def _leaks(before: Snapshot, *, shared_session: bool) -> list[str]:
    """Return leaked variables only: MPI may open connections and start threads at any time."""
    del shared_session
    return _all_leaks(before, shared_session=True)


def main(arguments: list[str]) -> int:
    """Run pytest with `arguments` as one process of mpirun; return its exit code."""
    with contextlib.closing(find_rendezvous(Config())) as session:
        Snapshot.leaks = _leaks  # type: ignore[method-assign, assignment]
        helpers.ranks.run_ranks = MpiRanks(session).run_ranks
        code = pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments])
        session.allgather(b"", timeout=timedelta(seconds=60))
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
