"""Call of a Python function on ranks that the mpirun of the site starts, for `horovod.run(use_mpi=True)`.

mpirun starts a worker (`launch.mpi_worker`) for each rank. The worker connects to this process, proves the job's
secret, receives the pickled call and sends back its value or its exception. On these ranks `init()` finds the other
ranks by MPI, as in any program that mpirun starts."""

import contextlib
import logging
import os
import pickle
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TypeVar

from farandole.config import Config
from farandole.errors import RankFailed, RendezvousError
from farandole.launch.backend import OnLine
from farandole.launch.backends.ssh import Ssh
from farandole.launch.channel import Outcome, WorkerFailure, WorkerValue
from farandole.launch.environment import with_settings
from farandole.launch.events import next_event
from farandole.launch.exceptions import load_exception
from farandole.launch.failures import Failure, culprit
from farandole.launch.hosts import is_local, route_to
from farandole.launch.mpi_worker import ADDRESSES, LARGEST_CALL, SECRET
from farandole.launch.mpirun import Asked, hosts_for_mpirun, prepare
from farandole.launch.output import Output
from farandole.launch.pickling import dump_call, load_value
from farandole.launch.processes import GRACE, RankProcess
from farandole.limits import naming_process_limit
from farandole.meeting.acceptor import AcceptingThread, Acceptor, Admitted, listen
from farandole.meeting.addresses import join_address
from farandole.meeting.frames import recv_frame, send_frame
from farandole.meeting.handshake import new_secret
from farandole.topology import interface_addresses, interface_names, loopback_address, own_addresses

log = logging.getLogger(__name__)

_EXIT = -1  # the rank of mpirun in the events
SETTLE = timedelta(seconds=1)  # for other ranks' failures
LAST_WORDS = timedelta(seconds=5)  # for mpirun to report why ranks have ended, and to end
EXIT_TIMEOUT = timedelta(seconds=30)  # for mpirun, once all functions have returned
GONE = timedelta(seconds=20)  # for processes that survive SIGKILL
NO_OUTCOME = "ended before its function returned"

T = TypeVar("T")


class MpirunOutput(Output):
    """Output that prints the lines as mpirun has tagged them."""

    def heading(self, rank: int, stream: str) -> str:
        """Return an empty prefix, because mpirun has tagged the line with its rank."""
        return ""


def asked_of_mpirun(
    ranks: int,
    hosts: str | None,
    hostfile: str | os.PathLike[str] | None,
    mpi_args: str | None,
    interface: str | None,
    ssh: Ssh,
    output_filename: str | os.PathLike[str] | None,
) -> Asked:
    """Return the request to mpirun for a call; raises `ConfigError`, and `SlotsError` for hosts with too few slots."""
    return Asked(
        ranks=ranks,
        hosts=hosts_for_mpirun(ranks, hosts, hostfile, os.environ),
        mpi_args=mpi_args or "",
        interfaces=() if interface is None else interface_names(interface),
        ssh=ssh,
        output=None if output_filename is None else os.fspath(output_filename),
    )


def call_by_mpirun(
    func: Callable[..., T],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    asked: Asked,
    start_timeout: float | timedelta | None = None,
    *,
    executable: str | None = None,
    on_line: OnLine,
) -> list[T]:
    """Call `func(*args, **kwargs)` on `asked.ranks` ranks that mpirun starts; return the results by rank.

    Blocks until every rank has returned. Afterwards, and when this process ends or is interrupted, mpirun and its
    processes are ended. `on_line` gets all lines as those of rank 0, because only mpirun knows their ranks. Raises
    `ConfigError` if there is no launcher or it does not support the request, `PicklingError`, `RendezvousError` naming
    the ranks that did not start within `start_timeout`, and the `RankFailed` of the rank that failed first, with its
    own exception as the cause."""
    payload = dump_call(func, args, kwargs)
    given: dict[str, timedelta | float | str] = {} if start_timeout is None else {"start_timeout": start_timeout}
    if asked.interfaces:
        given["interface"] = ",".join(asked.interfaces)
    config = Config.from_environment(os.environ, **given)
    secret = new_secret()
    with _Calls(asked.ranks, _listeners(asked), secret, pickle.dumps((list(sys.path), payload))) as calls:
        environment = with_settings(os.environ, config, given)
        environment |= {ADDRESSES: " ".join(calls.addresses), SECRET: secret.hex()}
        words = [executable or sys.executable, "-P", "-m", "farandole.launch.mpi_worker"]
        command, env = prepare(asked, words, environment, config.fabric)[1:]
        mpirun = RankProcess.start(command, env, rank=0, on_line=on_line, on_exit=calls.note_exit)
        try:
            return [load_value(rank, value) for rank, value in enumerate(calls.values(mpirun, config.start_timeout))]
        finally:
            mpirun.terminate(GRACE)
            if not mpirun.wait_gone(GRACE + GONE):
                log.error("mpirun survived SIGKILL; look for its processes in uninterruptible sleep")


class _Calls:
    """Server of the call: each worker fetches it and returns its outcome over a connection of its own."""

    def __init__(self, ranks: int, listeners: Sequence[socket.socket], secret: bytes, call: bytes) -> None:
        self.addresses = [join_address(*listener.getsockname()[:2]) for listener in listeners]
        self._ranks, self._call = ranks, call
        self._events: queue.SimpleQueue[tuple[int, Outcome | None]] = queue.SimpleQueue()  # _EXIT: mpirun has ended
        self._connections: dict[int, socket.socket] = {}
        self._threads: list[threading.Thread] = []
        acceptor = Acceptor(listeners, secret, me=b"launcher", service="the launcher", members=ranks)
        self._accepting = AcceptingThread(acceptor, self._admit, name="farandole-mpi-calls")

    def __enter__(self) -> "_Calls":
        return self

    def __exit__(self, *error: object) -> None:
        self._accepting.close()
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def note_exit(self, process: RankProcess) -> None:
        """Note the end of mpirun."""
        self._events.put((_EXIT, None))

    def values(self, mpirun: RankProcess, start_timeout: timedelta) -> list[bytes]:
        """Wait for the pickled values of all ranks, by rank; raises the `RankFailed` of the one that failed first."""
        values: dict[int, bytes] = {}
        failures: list[Failure] = []
        patience = LAST_WORDS
        for rank, outcome in self._outcomes(failures, mpirun, start_timeout):
            if isinstance(outcome, WorkerValue):
                values[rank] = outcome.data
            elif outcome is not None:
                failures.append(_failure(rank, outcome))
            else:
                # The rank has ended without an outcome: it is the culprit, unless another rank's failure is known.
                exit, patience = mpirun.wait(patience), timedelta(0)
                code = exit.shell_code if exit is not None and exit.code else 1
                known = any(not failure.consequence for failure in failures)
                failures.append(Failure(rank=rank, reason=NO_OUTCOME, code=code, consequence=known, tail=mpirun.tail))
        if failures:
            failure = culprit(failures)
            raise failure.error() from failure.cause
        self._require_all(values, mpirun)
        return [values[rank] for rank in range(self._ranks)]

    def _outcomes(
        self, failures: Sequence[Failure], mpirun: RankProcess, start_timeout: timedelta
    ) -> Iterator[tuple[int, Outcome | None]]:
        """Yield each rank's outcome as it arrives; end soon after a failure, and after the end of mpirun."""
        started = time.monotonic() + start_timeout.total_seconds()
        settled: float | None = None
        expected, arrived = self._ranks, 0
        while arrived < expected:
            if failures and settled is None:
                settled = time.monotonic() + SETTLE.total_seconds()
            all_run = len(self._connections) == self._ranks
            until = settled if settled is not None or all_run else started
            try:
                rank, outcome = next_event(self._events, until)
            except queue.Empty:
                if settled is not None:
                    return
                self._refuse_late(start_timeout)
                continue
            if rank == _EXIT:
                expected = len(self._connections)  # each of them ends now, with or without its outcome
                settled = settled or time.monotonic() + EXIT_TIMEOUT.total_seconds()
                continue
            arrived += 1
            yield rank, outcome

    def _refuse_late(self, start_timeout: timedelta) -> None:
        missing = sorted(set(range(self._ranks)) - self._connections.keys())
        if missing:
            seconds = start_timeout.total_seconds()
            problem = f"mpirun has not started all ranks within {seconds:g} s, or they do not reach the launcher"
            raise RendezvousError(problem, missing, ", ".join(self.addresses))

    def _require_all(self, values: Mapping[int, bytes], mpirun: RankProcess) -> None:
        exit = mpirun.wait(EXIT_TIMEOUT)
        missing = sorted(set(range(self._ranks)) - values.keys())
        if not missing and (exit is None or exit.code == 0):
            return
        how = "did not end" if exit is None else exit.reason
        rank = missing[0] if missing else 0
        reason = f"returned, but mpirun {how}" if not missing else f"did not start: mpirun {how}"
        raise RankFailed(rank, reason, "", mpirun.tail)

    def _admit(self, peer: Admitted) -> None:
        rank = int(peer.who)
        if not 0 <= rank < self._ranks or rank in self._connections:
            raise ValueError(f"there is no rank {rank} to start, or it runs already")
        thread = threading.Thread(target=self._serve, args=(rank, peer.sock), name=f"farandole-mpi-{rank}", daemon=True)
        self._connections[rank] = peer.sock
        try:
            with naming_process_limit(RendezvousError):
                thread.start()
        except BaseException:
            del self._connections[rank]
            raise
        self._threads.append(thread)

    def _serve(self, rank: int, connection: socket.socket) -> None:
        """Send the call and wait for its outcome; the body of a rank's thread."""
        outcome: Outcome | None = None
        with connection:
            try:
                send_frame(connection, self._call)
                outcome = pickle.loads(recv_frame(connection, LARGEST_CALL))
            except (OSError, EOFError):
                log.debug("rank %d has ended without an outcome", rank)
            except Exception as error:  # the outcome cannot be unpickled
                reason = f"sent an outcome that cannot be read ({type(error).__name__}: {error})"
                outcome = WorkerFailure(reason=reason, traceback="", at=0.0, code=1, consequence=False, exception=b"")
        self._events.put((rank, outcome))


def _failure(rank: int, outcome: WorkerFailure) -> Failure:
    cause, why = load_exception(outcome.exception)
    return Failure(  # `at` is the time of arrival, because clocks of hosts are unrelated
        rank=rank,
        reason=outcome.reason,
        code=outcome.code,
        consequence=outcome.consequence,
        traceback=outcome.traceback,
        cause=cause,
        no_cause=why,
    )


def _listeners(asked: Asked) -> list[socket.socket]:
    """Return a listener at each address of this machine at which workers may reach it."""
    if asked.interfaces:
        addresses = interface_addresses(",".join(asked.interfaces))
    elif asked.hosts and all(is_local(host.name) for host in asked.hosts):
        addresses = [loopback_address()]
    else:
        routes = [route_to(host.name) for host in asked.hosts if not is_local(host.name)]
        addresses = list(dict.fromkeys(route for route in routes if route)) if routes and all(routes) else []
        addresses = addresses or own_addresses()[1:] or [loopback_address()]
    with contextlib.ExitStack() as undo:
        listeners = [undo.enter_context(listen(address)) for address in addresses]
        undo.pop_all()
    return listeners
