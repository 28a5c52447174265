"""Registry of the dispatchers and workers of a data service, and its client.

A request has a connection of its own, on which client and server first prove the service's key to each other."""

import socket
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias

from farandole.closing import Closing
from farandole.errors import AuthenticationError, ConfigError, RendezvousError
from farandole.meeting.acceptor import AcceptingThread, Acceptor, Admitted, listen
from farandole.meeting.addresses import join_address
from farandole.meeting.dialer import dial
from farandole.meeting.frames import Deadline, Kinds, decode, recv_frame, send

ANSWER = timedelta(seconds=10)  # for a request or its answer to arrive, beyond the time that the request waits
LONGEST_WAIT = 20.0  # seconds that one request waits; the client then asks again, and so notices a lost server
MOST_CONNECTIONS = 4096  # open requests


@dataclass(frozen=True, slots=True)
class Ready:
    """A dispatcher at `address` serves, or, without an address, the worker `worker` of this dispatcher does."""

    dispatcher: int
    address: str = ""
    worker: int = -1


@dataclass(frozen=True, slots=True)
class Wait:
    """Waits up to `seconds` for the "dispatcher", for all its "workers", or for the "shutdown" of the service."""

    event: str
    dispatcher: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ShutDown:
    """Ends the service."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The dispatcher's address, or another text when the event has happened; None when it has not; or a problem."""

    value: str | None = None
    problem: str = ""


Request: TypeAlias = Ready | Wait | ShutDown
_REQUESTS = Kinds[Request](Ready, Wait, ShutDown)


class ComputeService(Closing):
    """Server that registers `dispatchers` dispatchers and the workers of each, until it is closed.

    It listens on the address `host` only, and reads nothing of a peer that has not proved `key`."""

    def __init__(
        self, dispatchers: int, workers_per_dispatcher: int, key: bytes, *, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        for name, value in (("dispatchers", dispatchers), ("workers_per_dispatcher", workers_per_dispatcher)):
            if value < 1:
                raise ConfigError(name, f"must be >= 1, got {value}")
        self._dispatchers, self._workers_per_dispatcher = dispatchers, workers_per_dispatcher
        self._addresses: dict[int, str] = {}
        self._workers: dict[int, set[int]] = {each: set() for each in range(dispatchers)}
        self._ended = self._closed = False
        self._change = threading.Condition()
        self._serving: set[threading.Thread] = set()
        listener = listen(host, port)
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self._name = f"the compute service at {join_address(*self.address)}"
        acceptor = Acceptor([listener], key, me=b"compute service", service=self._name)
        self._acceptor = AcceptingThread(acceptor, self._admit, name="farandole-compute-service")

    def shutdown(self) -> None:
        """End all waits for the shutdown; further registrations are refused."""
        with self._change:
            self._ended = True
            self._change.notify_all()

    def close(self) -> None:
        """Answer waiting clients, with a refusal unless the service was shut down, and stop listening; idempotent."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        self._acceptor.close()
        for thread in list(self._serving):
            thread.join(ANSWER.total_seconds())

    @property
    def _over(self) -> str:
        """Why nothing can be requested any more, or nothing."""
        return "it has been shut down" if self._ended else "its job ended without a shutdown" if self._closed else ""

    def _admit(self, admitted: Admitted) -> None:
        if len(self._serving) >= MOST_CONNECTIONS:
            raise ValueError(f"{MOST_CONNECTIONS} requests are open already")
        thread = threading.Thread(
            target=self._serve, args=(admitted.sock,), name="farandole-compute-request", daemon=True
        )
        self._serving.add(thread)
        thread.start()

    def _serve(self, sock: socket.socket) -> None:
        # A client that is gone, or sends no request, asks again or reports it.
        with sock, suppress(OSError, EOFError, RendezvousError):
            try:
                answer = self._answer(_REQUESTS.receive(sock, deadline=Deadline(ANSWER)))
            except ValueError as error:
                answer = Answer(problem=str(error))
            send(sock, answer, deadline=Deadline(ANSWER))
        self._serving.discard(threading.current_thread())

    def _answer(self, request: Request) -> Answer:
        if not isinstance(request, ShutDown) and request.dispatcher not in self._workers:
            return Answer(problem=f"there is no dispatcher {request.dispatcher}, but {self._dispatchers} from 0 on")
        with self._change:
            if isinstance(request, Wait):
                self._change.wait_for(lambda: self._over or self._found(request), min(request.seconds, LONGEST_WAIT))
                found = self._found(request)
                return Answer(found, self._over if found is None else "")
            if isinstance(request, ShutDown):
                self._ended = True
            elif self._over:
                return Answer(problem=self._over)
            elif not request.address:
                self._workers[request.dispatcher].add(request.worker)
            elif (known := self._addresses.setdefault(request.dispatcher, request.address)) != request.address:
                return Answer(
                    problem=f"dispatcher {request.dispatcher} is at {known} already, not at {request.address}"
                )
            self._change.notify_all()
        return Answer("done")

    def _found(self, wait: Wait) -> str | None:
        if wait.event == "dispatcher":
            return self._addresses.get(wait.dispatcher)
        if wait.event == "workers":
            return "ready" if len(self._workers[wait.dispatcher]) >= self._workers_per_dispatcher else None
        return "over" if self._ended else None


class ComputeClient:
    """Client of the service at one of `addresses`, (host, port), which it tries in turn.

    Methods block until the service answers, at most 10 s beyond their `timeout` in seconds. They raise
    `AuthenticationError` for another key than the service's, and `RendezvousError` for a service that is not reached,
    that refuses the request, or whose dispatcher or workers do not come in time."""

    def __init__(self, addresses: Iterable[tuple[str, int]], key: bytes) -> None:
        self.addresses, self._key = [join_address(*each) for each in addresses], key
        if not self.addresses:
            raise ConfigError("addresses", "has no address of the compute service; write the file anew")

    def register_dispatcher(self, dispatcher_id: int, dispatcher_address: str) -> None:
        """Register a dispatcher at "grpc://host:port"."""
        self._request(Ready(dispatcher_id, address=dispatcher_address))

    def register_worker_for_dispatcher(self, dispatcher_id: int, worker_id: int) -> None:
        """Register a worker that serves; a second time for the same worker has no effect."""
        self._request(Ready(dispatcher_id, worker=worker_id))

    def wait_for_dispatcher_registration(self, dispatcher_id: int, timeout: float) -> str:
        """Wait for a dispatcher and return its address."""
        return self._wait("dispatcher", dispatcher_id, timeout, f"dispatcher {dispatcher_id} has not registered")

    def wait_for_dispatcher_worker_registration(self, dispatcher_id: int, timeout: float) -> None:
        """Wait for all workers of a dispatcher."""
        self._wait("workers", dispatcher_id, timeout, f"not all workers of dispatcher {dispatcher_id} have registered")

    def wait_for_shutdown(self) -> None:
        """Wait for the end of the service, as long as the service answers."""
        while self._request(Wait("shutdown", 0, LONGEST_WAIT)) is None:
            pass

    def shutdown(self) -> None:
        """End the service: its workers and dispatchers on the compute side stop."""
        self._request(ShutDown())

    def _wait(self, event: str, dispatcher: int, timeout: float, lack: str) -> str:
        deadline = Deadline(timedelta(seconds=timeout))
        while True:
            try:
                left = deadline.remaining()
            except TimeoutError as error:
                problem = (
                    f"{lack} ({error}); look at the output of the compute workers and of the training, or raise timeout"
                )
                raise RendezvousError(problem, where=self.addresses[0]) from None
            if (found := self._request(Wait(event, dispatcher, min(left, LONGEST_WAIT)))) is not None:
                return found

    def _request(self, request: Request) -> str | None:
        seconds = request.seconds if isinstance(request, Wait) else 0.0
        sock, where = self._dial()
        with sock:
            try:
                send(sock, request, deadline=Deadline(ANSWER))
                answer = decode(
                    recv_frame(sock, 1 << 16, deadline=Deadline(ANSWER + timedelta(seconds=seconds))), Answer
                )
            except (OSError, EOFError, ValueError) as error:
                raise RendezvousError(
                    f"the compute service broke off ({error}); is its job over?", where=where
                ) from error
        if answer.problem:
            raise RendezvousError(f"the compute service refuses: {answer.problem}", where=where)
        return answer.value

    def _dial(self) -> tuple[socket.socket, str]:
        problems = []
        for where in self.addresses:
            try:
                return dial(where, self._key, me=b"compute client", deadline=Deadline(ANSWER))[0], where
            except AuthenticationError:
                raise
            except OSError as error:
                problems.append(f"{where}: {error}")
        raise RendezvousError(
            f"the compute service is not reached ({'; '.join(problems)}); start its job, and read its file"
        )
