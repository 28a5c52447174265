"""Attacks on the sockets of a Spark job's driver."""

import time
from contextlib import ExitStack
from datetime import timedelta

from farandole.handshake import new_secret
from farandole.spark.driver_log import DriverLog
from farandole.spark.relay import Relay
from helpers.strangers import crowd

__all__ = ["lines_arrive"]

LIMIT = timedelta(seconds=30)


def lines_arrive(strangers: int) -> float:
    """Return the seconds in which a line of each of two ranks reaches the driver."""
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
