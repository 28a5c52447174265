"""Attacks on the sockets of a Spark job's driver."""

import contextlib
import os
import signal
import tempfile
import threading
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

from farandole.meeting.handshake import new_secret
from farandole.spark.driver.log import DriverLog
from farandole.spark.driver.peers import Job
from farandole.spark.driver.relay import Relay
from farandole.spark.rows.exchange.access import KeeperPlan, Kept, local_name
from helpers.strangers import crowd

LIMIT = timedelta(seconds=30)
ROWS = bytes(range(256)) * 4096  # a megabyte


class WatchedKeeper(Job):
    """A job that notes the loss of a keeper."""

    def __init__(self) -> None:
        self.lost = threading.Event()

    def on_lost_keeper(self, *, begun: bool) -> None:
        self.lost.set()


def lines_arrive(strangers: int) -> float:
    """Return the seconds until a line of each of two ranks has reached the driver."""
    secret, shown = new_secret(), []
    with (
        DriverLog(secret, 2, host="127.0.0.1", show=lambda _, text: shown.append(text)) as log,
        ExitStack() as stack,
    ):
        address = log.address("127.0.0.1")
        if strangers:
            stack.enter_context(crowd([address], strangers))
        began = time.monotonic()
        relays = [Relay(address, rank, secret, lambda _: None, lambda _: None) for rank in range(2)]
        for relay in relays:
            relay.send("line", {"stream": "stdout", "text": "here"}, must=True)
            relay.close(LIMIT)
        took = time.monotonic() - began
        log.drain(LIMIT)
    assert sorted("".join(shown).splitlines()) == ["[0] here", "[1] here"]
    return took


def rows_are_kept(strangers: int) -> float:
    """Return the seconds to store a task's rows in a keeper and copy them to tasks of its host and of another host.

    The strangers connect to both sockets of the keeper."""
    secret = new_secret()
    with DriverLog(secret, 1, host="127.0.0.1") as log, ExitStack() as stack:
        plan = KeeperPlan(secret=secret, driver=log.address("127.0.0.1"))
        with Kept.started(plan) as first:
            address = first.address
        if strangers:
            stack.enter_context(crowd([address, local_name(secret).encode().hex()], strangers))
        began = time.monotonic()
        with Kept.started(plan) as task:
            borrowed = task.borrow()
            with borrowed.file:
                borrowed.file.write(ROWS)
            task.commit(borrowed.at + len(ROWS))
        for reader in (Kept.started(plan), Kept.at(address, secret)):
            with reader, tempfile.TemporaryFile(buffering=0) as out:
                reader.copy(borrowed.number, borrowed.at, len(ROWS), out)
                out.seek(0)
                assert out.read() == ROWS
        took = time.monotonic() - began
        stack.close()  # before the keeper, which ends with the driver log
        log.drain(LIMIT)
    return took


def keepers(plan: KeeperPlan) -> list[int]:
    """Return the process ids of this job's keeper; other jobs on this machine may have keepers of their own."""
    name = local_name(plan.secret).replace("\0", "@")
    sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    (inode,) = {words[6] for words in sockets if words[-1] == name and words[3] == "00010000"}  # a listening socket
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended
            if any(os.readlink(fd) == f"socket:[{inode}]" for fd in (process / "fd").iterdir()):
                found.append(int(process.name))
    assert found
    return found


def death_of_keeper() -> float:
    """Return the seconds until the driver notices that a keeper was killed."""
    secret, job = new_secret(), WatchedKeeper()
    with DriverLog(secret, 1, host="127.0.0.1", job=job) as log:
        plan = KeeperPlan(secret=secret, driver=log.address("127.0.0.1"))
        Kept.started(plan).close()
        began = time.monotonic()
        for pid in keepers(plan):
            os.kill(pid, signal.SIGKILL)
        assert job.lost.wait(LIMIT.total_seconds())
        return time.monotonic() - began
