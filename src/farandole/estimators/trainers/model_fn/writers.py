"""TensorBoard curves of a run, in the folders of training and evaluation."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

__all__ = ["Writers"]


class Writers:
    """One event file per subfolder of a run's folder, created at its first use and closed by `close`."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}

    def of(self, name: str) -> Any:
        """Return the `FileWriter` of the subfolder `name`; "" is the run's own folder."""
        assert self._folder is not None, "only rank 0 writes"
        if name not in self._files:
            with tf.Graph().as_default():  # a FileWriter cannot be created in eager mode
                # TensorFlow's own names are unique per second only, and a writer truncates a file of the same name.
                suffix = f".{os.getpid()}.{time.time_ns()}"
                self._files[name] = tf.compat.v1.summary.FileWriter(str(self._folder / name), filename_suffix=suffix)
        return self._files[name]

    def add(self, name: str, values: Mapping[str, float], step: int) -> None:
        """Add a point to each curve, and flush the file."""
        summary = tf.compat.v1.Summary
        points = [summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self.of(name).add_summary(summary(value=points), step)
        self.of(name).flush()

    def close(self) -> None:
        """Close the files and end their threads."""
        for each in self._files.values():
            each.close()
