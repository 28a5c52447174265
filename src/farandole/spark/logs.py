"""Messages of a rank to the driver while it trains: lines for the user, and its progress."""

import sys
from collections.abc import Mapping

from farandole.spark.child import current_rank

__all__ = ["LONGEST_MESSAGE", "log_to_driver", "send"]

LONGEST_MESSAGE = 4000  # characters; what HorovodRunner's users know


def log_to_driver(message: str) -> None:
    """Show `message` in the driver's output, whatever `driver_log_verbosity` is; cut above 4000 characters.

    Waits a moment when the channel is full, so that a burst arrives whole. Outside a Spark task it goes to the
    standard output, which for local ranks is the driver's."""
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
    """Send plain values to the driver's `on_message`; False when there is no driver or the message was dropped.

    Never blocks: messages that the driver cannot keep up with are counted and reported there. Raises `TypeError`
    for values that are not plain (JSON)."""
    rank = current_rank()
    return rank is not None and rank.channel.send(kind, payload)
