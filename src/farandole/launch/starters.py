"""Programs of a site that start the ranks in place of `farandole run`; each is a module of this package."""

import argparse
from collections.abc import Mapping, Sequence
from typing import NoReturn, Protocol

from farandole.config import Config
from farandole.launch import mpirun
from farandole.launch.options import Given


class Starter(Protocol):
    """Functions of the module of a program that starts the ranks."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add the program's options, as a group."""

    def is_asked(self, given: Given) -> bool:
        """Return whether the options `given` ask for the program."""

    def without_meaning(self, given: Given) -> Sequence[str]:
        """Return a sentence for each given option of the program, which the options do not ask for."""

    def start(self, given: Given, hosts: str | None, settings: Config, environment: Mapping[str, str]) -> NoReturn:
        """Become the program, on `hosts` in the form of -H, or those of a file; raises `ConfigError` if it cannot."""


STARTERS: Sequence[Starter] = (mpirun,)


def find_starter(given: Given) -> Starter | None:
    """Return the program that the options ask for; None if `farandole run` starts the ranks itself."""
    return next((each for each in STARTERS if each.is_asked(given)), None)
