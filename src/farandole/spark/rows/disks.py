"""Files without names on an executor's disks, for rows: other processes cannot find them, and none is left behind."""

import os
import tempfile
from collections.abc import Mapping
from typing import BinaryIO

from farandole.errors import CacheError


def local_directory(env: Mapping[str, str], turn: int) -> str:
    """Return one of the executor's local directories, in rotation by `turn`, so that ranks of a host use all disks."""
    # The variable of YARN, then that of other cluster managers, in the order in which Spark itself reads them.
    for name in ("LOCAL_DIRS", "SPARK_LOCAL_DIRS"):
        directories = [each for each in env.get(name, "").split(",") if each and os.access(each, os.W_OK)]
        if directories:
            return directories[turn % len(directories)]
    return tempfile.gettempdir()


def nameless_file(directory: str) -> BinaryIO:
    """Open a new file that never has a name: the kernel frees it with the last process that holds it.

    Raises `CacheError` naming the directory."""
    try:
        return tempfile.TemporaryFile(dir=directory, prefix="farandole-", suffix=".arrow", buffering=0)
    except OSError as error:
        raise no_room(error, directory) from error


def no_room(error: OSError, directory: str) -> CacheError:
    """Return the `CacheError` for `error`, with the name of its directory."""
    return CacheError(directory, f"cannot hold the rank's rows ({error}); give spark.local.dir more room")
