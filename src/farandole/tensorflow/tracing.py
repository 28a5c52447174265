"""Decorator that excludes functions from AutoGraph, which would rewrite them slowly and without need."""

from collections.abc import Callable
from typing import TypeVar

import tensorflow as tf

F = TypeVar("F", bound=Callable[..., object])


def as_written(function: F) -> F:
    """Exclude `function` and its callees from conversion by AutoGraph."""
    wrapped: F = tf.autograph.experimental.do_not_convert(function)
    return wrapped
