"""How the processes that a program starts answer `import horovod` as well: by a folder on their PYTHONPATH."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from farandole.compat.answers import IMPORTABLE

__all__ = ["env", "environment_of_ranks", "pass_on", "with_answers"]


def with_answers(environment: Mapping[str, str]) -> dict[str, str]:
    """A copy of `environment` that leads Python to the folder; what it had on its path comes after."""
    folders = [str(IMPORTABLE), *environment.get("PYTHONPATH", "").split(os.pathsep)]
    return {**environment, "PYTHONPATH": os.pathsep.join(dict.fromkeys(each for each in folders if each))}


def environment_of_ranks() -> dict[str, str]:
    """This process's environment, with the answers for ranks."""
    return with_answers(os.environ)


def pass_on() -> None:
    """Let all processes that this one starts from now on find the answers."""
    os.environ.update(with_answers(os.environ))


@contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Set environment variables, remove those that are None, and put all back when the block ends."""
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
