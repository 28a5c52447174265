"""Agent of a launcher on another host, `python -m farandole.launch.agent`: starts the host's ranks and follows them.

It exchanges messages with the launcher over its standard input and output. When the launcher or the connection is gone,
it ends its ranks, except those that outlive a launcher whose end the launcher's host confirms. When the agent itself is
killed, or stopped for as long as the launcher waits for a sign of life, the guards of its ranks end them.
"""

import logging
import os
import socket
import sys
import threading
from dataclasses import replace
from datetime import timedelta

from farandole.launch.backend import Call, Command, Rank, Task
from farandole.launch.backends.local import LocalAgent
from farandole.launch.failures import Failure, to_payload
from farandole.launch.messages import (
    FROM_LAUNCHER,
    MARKER,
    Answer,
    Ask,
    End,
    EndMember,
    FromLauncher,
    Gone,
    Hello,
    Line,
    Look,
    Looked,
    Messages,
    Quit,
    Recall,
    Recalled,
    Start,
)
from farandole.launch.processes import GRACE
from farandole.launch.survivors import append_line, note_end
from farandole.launch.versions import own_versions
from farandole.limits import naming_process_limit
from farandole.meeting.addresses import split_address
from farandole.meeting.launched.elastic import MemberEnvironment, is_launcher_lost
from farandole.topology import own_addresses

REACH = 10.0  # seconds for a connection to the address that the launcher tries
GONE = timedelta(seconds=20)  # for ranks that are ended, beyond their grace
FOR_EVER = timedelta(days=365)


def main() -> int:
    """Serve the launcher until it closes the connection."""
    logging.basicConfig(format="farandole: %(message)s", stream=sys.stderr)
    incoming, outgoing = os.dup(0), os.dup(1)
    # Nothing else may read or write the launcher's pipes.
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    with LocalAgent() as local:
        serve(incoming, outgoing, local)
    return 0


def serve(incoming: int, outgoing: int, local: LocalAgent, *, own_paths: bool = False) -> None:
    """Start and end ranks by `local` for the launcher at the other end of two descriptors, until it is gone.

    Closes the descriptors. Blocks until no process of the ranks is left. With `own_paths` calls find modules on this
    process's `sys.path`, else on the launcher's."""
    os.write(outgoing, MARKER)
    messages = Messages[FromLauncher](incoming, outgoing, FROM_LAUNCHER)
    service = _Service(messages, local, own_paths)
    try:
        service.serve()
    except EOFError:  # the launcher is gone, or has given this host up
        service.outlive_launcher()
    except OSError:  # the connection is broken, or silent: TimeoutError is an OSError
        pass
    finally:
        service.end_ranks()
        messages.close()


def _own_name() -> str:
    """Return a name or address of this host to which the launcher can find a route."""
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        # Other hosts cannot resolve the host name of a pod without a Service.
        addresses = own_addresses()
        return addresses[min(1, len(addresses) - 1)]  # the first is loopback
    return socket.gethostname()


class _Service:
    """Answers the launcher's messages."""

    def __init__(self, messages: Messages[FromLauncher], local: LocalAgent, own_paths: bool) -> None:
        self._messages, self._local, self._own_paths = messages, local, own_paths
        self._ranks: dict[int, Rank] = {}
        self._starting = threading.Lock()
        self._surviving: list[Start] = []  # orders for ranks that outlive the launcher

    def serve(self) -> None:
        """Greet the launcher and serve its messages until it says `Quit`; raises `EOFError` or `OSError` when it is
        gone."""
        client, _, server, _ = (os.environ.get("SSH_CONNECTION") or "   ").split(" ")
        # Within a step of srun: the address of srun as the node sees it, and the node's own name.
        client, server = client or os.environ.get("SLURM_LAUNCH_NODE_IPADDR", ""), server or _own_name()
        cores = list(self._local.cores)
        identity, usable = self._local.identity, self._local.usable_cores
        self._messages.send(Hello(own_versions(), identity, client, server, cores, usable, [*self._local.gpus]))
        while True:
            message = self._messages.receive()
            if isinstance(message, Ask):
                self._messages.send(self._answer(message.reach))
            elif isinstance(message, Start):
                self._start(message)
            elif isinstance(message, Look):
                self._messages.send(Looked(message.member, self._local.is_stopped(message.member, message.secret)))
            elif isinstance(message, EndMember):
                self._local.end_member(message.member, message.secret)
            elif isinstance(message, Recall):
                if (code := self._local.noted_end(message.log)) is not None:
                    self._messages.send(Recalled(message.log, code))
            elif isinstance(message, Quit):
                return
            elif message.rank in self._ranks:  # if not, it could not be started
                self._ranks[message.rank].terminate(timedelta(seconds=message.grace))

    def outlive_launcher(self) -> None:
        """Wait for the end of ranks that outlive their launcher; does nothing unless that has ended, for certain."""
        launchers = [
            member.launcher for each in self._surviving if (member := MemberEnvironment.read(each.assignment.env))
        ]
        if launchers and is_launcher_lost(launchers[-1]):
            for order in self._surviving:
                self._ranks[order.assignment.rank].wait_gone(FOR_EVER)

    def end_ranks(self) -> None:
        """End all ranks and wait until no process of them is left."""
        for rank in self._ranks.values():
            rank.terminate(GRACE)
        for rank in self._ranks.values():
            rank.wait_gone(GRACE + GONE)

    def _answer(self, reach: str) -> Answer:
        """Connect to `reach`, where the launcher listens, or reserve a port."""
        try:
            if not reach:
                return Answer(reach, str(self._local.reserve_port()))
            with socket.create_connection(split_address(reach), timeout=REACH) as probe:
                return Answer(reach, probe.getsockname()[0])
        except OSError as error:
            return Answer(reach, "", str(error))

    def _start(self, order: Start) -> None:
        """Start a rank, or report its failure: an `OSError` of the start does not mean that the launcher is gone."""
        number, task = order.assignment.rank, _task(order)
        if isinstance(task, Call) and not self._own_paths:
            sys.path[:] = order.paths  # for the worker, and for unpickling the call's exceptions here
        if order.assignment.survivor_log:
            self._surviving.append(order)
            # The ranks' guards end them with this process.
            order = replace(order, assignment=replace(order.assignment, survivor_log=""))
        try:
            self._local.stop_limit = order.silence
            with naming_process_limit(OSError), self._starting:
                self._ranks[number] = rank = self._local.start(order.assignment, task, self._line, self._end)
            with naming_process_limit(OSError):
                gone = threading.Thread(
                    target=self._send_gone, args=(rank,), name=f"farandole-gone-{number}", daemon=True
                )
                gone.start()
        except OSError as error:
            failure = Failure(rank=number, reason=f"could not be started: {error}", code=126)
            self._send(End(number, to_payload(failure), b""))
            if number in self._ranks:  # no thread waits for its end
                self._ranks[number].terminate(timedelta(0))
                self._ranks[number].wait_gone(GONE)
            self._send(Gone(number))

    def _line(self, rank: int, stream: str, line: str) -> None:
        try:
            self._messages.send(Line(rank, stream, line))
        except OSError:
            if not (log := self._survivor_log(rank)):
                raise
            append_line(log, line)

    def _end(self, number: int, failure: Failure | None) -> None:
        with self._starting:  # a rank can end before the call that starts it returns
            rank = self._ranks[number]
        payload = None if failure is None else to_payload(failure)
        sent = self._send(End(number, payload, rank.value() if failure is None else b""))
        if not sent and (log := self._survivor_log(number)):
            note_end(log, 0 if failure is None else failure.code)

    def _send_gone(self, rank: Rank) -> None:
        if rank.wait_gone(FOR_EVER):
            self._send(Gone(rank.rank))

    def _survivor_log(self, rank: int) -> str:
        """Return the log of a rank that outlives the launcher; "" for another one."""
        logs = [each.assignment.survivor_log for each in self._surviving if each.assignment.rank == rank]
        return logs[-1] if logs else ""

    def _send(self, message: End | Gone) -> bool:
        """Send a message; False if the launcher is gone: `serve` ends with that."""
        try:
            self._messages.send(message)
        except OSError:
            return False
        return True


def _task(order: Start) -> Task:
    if order.words:
        return Command(order.words)
    timeout = timedelta(seconds=order.start_timeout)
    return Call(order.payload, order.executable, timeout, runner=order.runner, keep_all=order.keep_all)


if __name__ == "__main__":
    sys.exit(main())
