"""Objects that are kept as files, with or without Spark. Nothing is imported here: registering these is cheap."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Self

__all__ = ["Portable"]


class Portable:
    """An estimator or a fitted model as the files of one folder, in the layout of pyspark.ml."""

    @abstractmethod
    def to_files(self) -> Mapping[str, bytes]:
        """Return the content of each file by its path in the folder, without Spark.

        Raises `PicklingError` for what cannot be pickled."""

    @classmethod
    @abstractmethod
    def from_files(cls, read: Callable[[str], bytes]) -> Self:
        """Return the object whose files `read` gives by their paths; it is of this class or of one below it.

        Unpickles: read only what you trust. Raises `ConfigError` for an object of another class."""
