"""Environment of child processes, with the folder on PYTHONPATH that makes `import horovod` work in them."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from farandole.compat.answers import IMPORTABLE
from farandole.launch.environment import wants_torch, without_torch
from farandole.topology import TORCH_PLACES, TORCH_STORE

# Variables of launchers, in the order in which Horovod reads them.
_PLACES = (
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


def with_answers(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of `environment` for programs of Horovod: with the folder in front of its PYTHONPATH, and with the
    setting that leaves torchrun's variables out."""
    folders = [str(IMPORTABLE), *environment.get("PYTHONPATH", "").split(os.pathsep)]
    return {
        **without_torch(environment),
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(each for each in folders if each)),
    }


def environment_of_ranks() -> dict[str, str]:
    """Return this process's environment for ranks, with the folder on their path and the name of this Python."""
    return {**with_answers(os.environ), "FARANDOLE_LAUNCHER": sys.executable}


def get_env_rank_and_size() -> tuple[int, int]:
    """Return rank and size from the launcher's variables, (0, 1) without them. Does not need `init()`.

    Raises `RuntimeError` if only one of the two variables is set."""
    for rank, size in _PLACES:
        given = [os.environ.get(name) for name in (rank, size)]
        if None not in given:
            return int(os.environ[rank]), int(os.environ[size])
        if given != [None, None]:
            raise RuntimeError(f"{rank} and {size} belong together: set both, or none")
    return 0, 1


def pass_on() -> None:
    """Prepare the environment of this process, and of all that it starts from now on, for programs of Horovod.

    It gets the folder, and loses the variables of torchrun that `farandole run` has set by default."""
    if "FARANDOLE_TORCH_STORE" in os.environ and not wants_torch(without_torch({})):
        for name in (*TORCH_PLACES, *TORCH_STORE):
            os.environ.pop(name, None)
    os.environ.update(with_answers(os.environ))


@contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Set environment variables, remove those that are None, and restore all of them when the block ends."""
    before = {name: os.environ.get(name) for name in kwargs}
    try:
        _set(kwargs)
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
