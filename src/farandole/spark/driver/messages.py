"""Messages of a rank to the driver while it trains: lines for the user, and its progress."""

import sys
from collections.abc import Mapping

from farandole.spark.jobs.child import current_rank

LONGEST_MESSAGE = 4000  # characters, as users of HorovodRunner expect


def log_to_driver(message: str) -> None:
    """Show `message`, cut to 4000 characters, in the driver's output, whatever `driver_log_verbosity` is.

    Waits up to 2 s for room in the channel, so that a burst arrives whole. Outside a Spark task the message goes to
    standard output, which local ranks share with the driver."""
    if not isinstance(message, str):
        raise TypeError(f"message must be a string, got {type(message).__name__}")
    message = message[:LONGEST_MESSAGE]
    rank = current_rank()
    if rank is None:
        sys.stdout.write(f"{message}\n")
        sys.stdout.flush()
    else:
        rank.channel.send("log", {"text": message}, patient=True)


def send(kind: str, payload: Mapping[str, object]) -> bool:
    """Send JSON values to the driver's `on_message`; returns False without a driver, or if the message was dropped.

    Never blocks: a message for which the channel has no room is dropped, and the driver shows how many were. Raises
    `TypeError` for values that JSON does not know, `ValueError` for a message over 64 KiB."""
    rank = current_rank()
    return rank is not None and rank.channel.send(kind, payload)
