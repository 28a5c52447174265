"""The folder on PYTHONPATH by which child processes answer `import horovod`."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from farandole.compat.answers import IMPORTABLE

__all__ = ["env", "environment_of_ranks", "pass_on", "with_answers"]


def with_answers(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of `environment` with the folder in front of its PYTHONPATH."""
    folders = [str(IMPORTABLE), *environment.get("PYTHONPATH", "").split(os.pathsep)]
    return {**environment, "PYTHONPATH": os.pathsep.join(dict.fromkeys(each for each in folders if each))}


def environment_of_ranks() -> dict[str, str]:
    """Return this process's environment for ranks, with the folder on their path."""
    return with_answers(os.environ)


def pass_on() -> None:
    """Put the folder on the path of all processes that this one starts from now on."""
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
