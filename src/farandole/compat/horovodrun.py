"""The command `horovodrun`: `farandole run` with Horovod's file of options, and ranks that answer `import horovod`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from farandole.compat.answers import VERSION
from farandole.compat.children import environment_of_ranks
from farandole.compat.options_file import read_options
from farandole.compat.output import HorovodOutput
from farandole.errors import ConfigError
from farandole.launch.cli import launch, run_parser
from farandole.launch.options import Given, GivenAction


def run_commandline(arguments: Sequence[str] | None = None) -> int:
    """Run a program as N ranks; returns the exit code, see `farandole run`.

    The ranks' lines begin as Horovod's do, with "[0]<stdout>:". A warning names the options that are ignored. Refused
    options end the command with a sentence."""
    words = sys.argv[1:] if arguments is None else arguments
    return launch(make_parser(), words, environment_of_ranks(), HorovodOutput)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    return run_parser("horovodrun", VERSION, _ReadFile)


class _ReadFile(GivenAction):
    """Action that adds a file's options; options on the command line, before or after it, take precedence."""

    def take(self, parser: argparse.ArgumentParser, given: Given, values: object, option: str) -> None:
        """Read the file; a problem with it ends the command."""
        try:
            words = read_options(Path(str(values)))
        except ConfigError as error:
            parser.error(f"{option}: {error}")
        of_file = parser.parse_args(words, namespace=Given())
        given.settings = {**of_file.settings, **given.settings}
        given.ignored += of_file.ignored
        given.mpi_in_file = of_file.mpi


if __name__ == "__main__":
    sys.exit(run_commandline())
