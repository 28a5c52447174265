"""Keeps our own code out of AutoGraph, which would rewrite what is called in a tf.function: slow, and for nothing."""

from collections.abc import Callable
from typing import TypeVar

import tensorflow as tf

__all__ = ["as_written"]

F = TypeVar("F", bound=Callable[..., object])


def as_written(function: F) -> F:
    """Make `function`, and what it calls, run as it is written wherever it is called."""
    wrapped: F = tf.autograph.experimental.do_not_convert(function)
    return wrapped
