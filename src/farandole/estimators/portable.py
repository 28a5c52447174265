"""Interface of objects that can be saved as files, with or without Spark. It imports nothing, so it loads quickly."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Self


class Portable:
    """An estimator or a fitted model that can be saved as the files of one folder, in the layout of pyspark.ml."""

    @abstractmethod
    def to_files(self) -> Mapping[str, bytes]:
        """Return the content of each file by its path in the folder, without Spark.

        Raises `PicklingError` if a part of the object cannot be pickled."""

    @classmethod
    @abstractmethod
    def from_files(cls, read: Callable[[str], bytes]) -> Self:
        """Return the object of this class or a subclass whose files `read` returns by their paths.

        Unpickles: read only what you trust. Raises `ConfigError` for an object of another class."""
