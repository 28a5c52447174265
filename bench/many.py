"""Cost of the launcher for many ranks and many hosts.

    python bench/many.py [--rounds 3] [--local 16] [--ranks 4096] [--most 64]

* 64 ranks on 4 hosts (network namespaces with a real sshd each): the time from the command until `init()` has returned
  on all ranks.
* The rendezvous of 64 to 4096 simulated ranks, which are connections of one other process: the time from the first
  connection to the last answer, and the greatest memory of the server.
* Agents on 2 to 64 hosts, which are names of two sshd: the launcher's processor time per host, with its ssh clients.
  The agents' own time does not count, because they would run on other machines.

The hosts need root and sshd. Prints tables and writes bench/results/*-many.json."""

import argparse
import json
import multiprocessing
import os
import random
import resource
import selectors
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from launch import until_initialized
from namespaces import bridge, namespaces
from race import Race, race, record

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from farandole.errors import RendezvousError
from farandole.launch.backend import Host
from farandole.launch.backends.ssh import Ssh, SshBackend
from farandole.meeting.addresses import split_address
from farandole.meeting.frames import LENGTH, Steps, encode, frame
from farandole.meeting.handshake import handshake_steps, new_secret
from farandole.meeting.rounds import Caller, decode_result
from farandole.meeting.server import RendezvousServer, Request, result_limit
from helpers.ssh_hosts import key, net_of, problem, serve, wait_for_server, write_client_config

PROGRAM = """
import farandole.numpy as hvd
hvd.init()
rank = hvd.rank()
"""
SECONDS = 120.0  # that simulated ranks wait
FILES = 20_000  # limit of open files to set, if the system allows it


@contextmanager
def serving(folder: Path, count: int, aliases: int = 0) -> Iterator[tuple[list[str], list[str], Path]]:
    """Start `count` hosts with an sshd each; yield their addresses, `aliases` more names, and ssh's configuration.

    The additional names refer to the hosts in turn."""
    Path("/run/sshd").mkdir(exist_ok=True)
    for name in ("mine", "stranger", "server"):
        key(folder / name)
    with namespaces(count) as spaces, bridge(spaces) as address:
        addresses = [f"{net_of(address)}{place + 1}" for place in range(count)]
        config = write_client_config(folder, addresses, [])
        public = (folder / "server.pub").read_text()
        named = {f"host{place}": addresses[place % count] for place in range(aliases)}
        with (folder / "known_hosts").open("a") as known:
            known.writelines(f"{name} {public}" for name in named)
        lines = (f"Host {name}\n  HostName {there}\n  HostKeyAlias {name}\n" for name, there in named.items())
        config.write_text("".join(lines) + config.read_text())
        servers = [serve(folder, space, more="MaxStartups 1000\n") for space in spaces]
        try:
            for name in addresses:
                wait_for_server(config, name)
            yield addresses, list(named), config
        finally:
            for each in servers:
                each.kill()
                each.wait()


def start(rounds: int, local: int) -> Race:
    """Measure the start of `local` ranks on each of four hosts."""
    with (
        tempfile.TemporaryDirectory(prefix="farandole-bench-") as folder,
        serving(Path(folder), 4) as (hosts, _, config),
    ):
        size = local * len(hosts)
        words = [sys.executable, "-m", "farandole.launch.cli", "run", "-np", str(size)]
        words += ["-H", ",".join(f"{name}:{local}" for name in hosts), "--ssh-command", f"ssh -F {config}"]
        return race({"farandole run": lambda: until_initialized([*words, sys.executable], PROGRAM, size)}, rounds)


def payload(rank: int) -> bytes:
    """Return a payload like that of `init()`: its names and settings are the same for all ranks, its addresses are not.

    The ranks of eight are on one host."""
    some = random.Random(rank)
    card = {
        "host": f"node{rank // 8}#{random.Random(rank // 8).getrandbits(48):012x}",
        "unix": f"{some.getrandbits(48):012x}",
        "tcp": f"10.1.{rank // 2048}.{rank // 8 % 256}:{some.randint(32768, 60999)}",
        "flat": False,
        "slot_bytes": 131072,
        "chunk": 131072,
        "is_chunk_chosen": False,
        "cores": {"affinity": "ffff", "quota": 0},
        "offer": {"setting": "auto", "fabric": "", "address": "", "reason": ""},
    }
    return json.dumps(["_Card", card, {}]).encode()


def conversation(secret: bytes, rank: int, size: int) -> Steps[None]:
    """Yield the bytes that a rank sends and the numbers of bytes that it reads, up to the length of the answer."""
    me = encode(Caller(rank=rank, size=size, generation=0, round=0))
    yield from handshake_steps(secret, me=me, accept=False, where="the rendezvous")
    yield frame(encode(Request(SECONDS, False, payload(rank))))


class SimulatedRank:
    """A rank's side of the rendezvous: handshake, request and answer. Only rank 0 keeps the answer."""

    def __init__(self, address: tuple[str, int], secret: bytes, rank: int, size: int) -> None:
        self.sock = socket.create_connection(address)
        self.sock.setblocking(False)
        self.keeps = rank == 0
        self.rank, self.steps = rank, conversation(secret, rank, size)
        self.received, self.answer = bytearray(), bytearray()
        self.left = -1  # bytes of the answer that have not arrived; -1 before its length is known
        self.wanted = self._advance(None)  # bytes of the handshake to read next; 0 after the handshake

    def _advance(self, received: bytes | None) -> int:
        step = next(self.steps) if received is None else self.steps.send(received)
        while isinstance(step, bytes):
            self.sock.sendall(step)
            step = next(self.steps, 0)
        return step

    def receive(self) -> bool:
        """Read the received bytes without blocking; return whether the answer is complete.

        Raises `ConnectionError` if the server closed this connection in favour of newer ones, `RendezvousError` if it
        closed the connection after the handshake."""
        if self.left >= 0:
            data = self.sock.recv(min(1 << 18, self.left))
            self.left -= len(data)
            self.answer += data if self.keeps else b""
        else:
            wanted = self.wanted or LENGTH.size
            data = self.sock.recv(wanted - len(self.received))
            self.received += data
            if len(self.received) == wanted:
                self._take()
        if not data:
            if self.wanted:
                raise ConnectionError("the server made way")
            raise RendezvousError("the rendezvous broke off")
        return self.left == 0

    def _take(self) -> None:
        received, self.received = bytes(self.received), bytearray()
        if self.wanted:
            self.wanted = self._advance(received)
        else:
            (self.left,) = LENGTH.unpack(received)


def simulated(address: str, secret: bytes, size: int) -> tuple[float, int]:
    """Simulate the rendezvous of `size` ranks; return the seconds until the last answer, and the retries.

    Raises `TimeoutError` if that takes longer than `SECONDS`."""
    started = time.monotonic()
    where, retried, kept = split_address(address), 0, bytearray()
    with selectors.DefaultSelector() as selector:

        def call(rank: int) -> None:
            made = SimulatedRank(where, secret, rank, size)
            selector.register(made.sock, selectors.EVENT_READ, made)

        for rank in range(size):
            call(rank)
        while waiting := len(selector.get_map()):
            events = selector.select(SECONDS)
            if not events or time.monotonic() > started + SECONDS:
                raise TimeoutError(f"{waiting} of {size} simulated ranks got no answer within {SECONDS:g} s")
            for each, _ in events:
                rank = each.data
                try:
                    if not rank.receive():
                        continue
                    kept = rank.answer if rank.keeps else kept
                except ConnectionError:
                    retried += 1
                    call(rank.rank)
                selector.unregister(rank.sock)
                rank.sock.close()
    seconds = time.monotonic() - started
    answer = decode_result(bytes(kept), address, result_limit(size))
    assert answer == [payload(rank) for rank in range(size)], "the ranks got other payloads"
    return seconds, retried


def allow_files() -> None:
    """Raise this process's limit of open files as far as allowed, to `FILES` at most."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    most = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def serve_rendezvous(size: int, pipe: "multiprocessing.connection.Connection") -> None:
    """Serve one rendezvous in this process; send its address and secret, and at the end the peak memory in MiB."""
    allow_files()
    secret = new_secret()
    with RendezvousServer(size, secret) as server:
        pipe.send((server.address, secret))
        pipe.recv()
    pipe.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def receive(pipe: "multiprocessing.connection.Connection") -> Any:
    """Return what the server's process sends. Raises `EOFError` if it has died, `TimeoutError` if it sends nothing."""
    if not pipe.poll(SECONDS):
        raise TimeoutError(f"the server's process sent nothing for {SECONDS:g} s")
    return pipe.recv()


def meet(size: int) -> tuple[float, float, float]:
    """Return the seconds of the rendezvous of `size` ranks, the peak MiB of the server's process, and the retries."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=serve_rendezvous, args=(size, there))
    server.start()
    there.close()  # the server's process has the only other copy, so its death ends the pipe
    try:
        address, secret = receive(here)
        seconds, retried = simulated(address, secret, size)
        here.send(None)
        memory = receive(here)
    finally:
        server.kill()  # after its last message it has nothing more to do
        server.join()
    return seconds, memory, retried


def processor_seconds() -> float:
    """Return the processor time of this process and of the children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def agents(names: list[str], config: Path) -> tuple[float, float]:
    """Start the agents of hosts; return the seconds, and the launcher's processor seconds per host."""
    backend = SshBackend([Host(name, 1) for name in names], Ssh(command=f"ssh -F {config}"))
    before, started = processor_seconds(), time.monotonic()
    with backend.open_agents(backend.hosts):
        seconds = time.monotonic() - started
    return seconds, (processor_seconds() - before) / len(names)


def powers(least: int, most: int, by: int = 4) -> list[int]:
    """Return `least`, `least * by`, `least * by**2` and so on below `most`, then `most`."""
    sizes = [least]
    while sizes[-1] * by < most:
        sizes.append(sizes[-1] * by)
    return [*sizes, most] if most > least else [most]


def repeated(title: str, names: Sequence[str], action: Callable[[], Sequence[float]], rounds: int) -> Race:
    """Call `action` `rounds` times, print the medians of its values by name, and return all values."""
    done = [action() for _ in range(rounds)]
    columns = {name: [each[place] for each in done] for place, name in enumerate(names)}
    medians = (f"{name} {sorted(values)[len(values) // 2]:.4g}" for name, values in columns.items())
    sys.stdout.write(f"{title:<40} {', '.join(medians)}\n")
    sys.stdout.flush()
    return Race(columns)


def main() -> None:
    """Measure the three parts, print the results, and record them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--local", type=int, default=16, help="ranks on each of four hosts; 0 leaves the part out")
    parser.add_argument("--ranks", type=int, default=4096, help="most simulated ranks; 0 leaves the part out")
    parser.add_argument("--most", type=int, default=64, help="most hosts with agents; 0 leaves the part out")
    given = parser.parse_args()
    races: dict[str, Race] = {}
    allow_files()
    for size in powers(64, given.ranks) if given.ranks else []:
        title = f"rendezvous of {size}"
        races[title] = repeated(title, ("seconds", "MiB of the server", "retries"), partial(meet, size), given.rounds)
    if problem() and (given.local or given.most):
        sys.stdout.write(f"no hosts: {problem()}\n")
        given.local = given.most = 0
    if given.most:
        with (
            tempfile.TemporaryDirectory(prefix="farandole-bench-") as folder,
            serving(Path(folder), 2, given.most) as (_, names, config),
        ):
            for count in powers(2, given.most):
                title = f"agents of {count} hosts"
                some = names[:count]
                columns = ("seconds", "launcher's processor seconds per host")
                races[title] = repeated(title, columns, partial(agents, some, config), given.rounds)
    if given.local:
        title = f"start of {4 * given.local} ranks on 4 hosts"
        races[title] = start(given.rounds, given.local)
        sys.stdout.write(f"{title} (min / median / max)\n{races[title].report()}\n")
    sys.stdout.write(f"{record('many', races, ('farandole', 'numpy'))}\n")


if __name__ == "__main__":
    main()
