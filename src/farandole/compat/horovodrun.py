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
from farandole.launch.options import Given

__all__ = ["make_parser", "run_commandline"]


def run_commandline(arguments: Sequence[str] | None = None) -> int:
    """Run a program as N ranks; returns the exit code, see `farandole run`.

    The ranks' lines begin as Horovod's do, with "[0]<stdout>:". A warning names the options that are ignored. Refused
    options end the command with a sentence."""
    words = sys.argv[1:] if arguments is None else arguments
    return launch(make_parser(), words, environment_of_ranks(), HorovodOutput)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    return run_parser("horovodrun", VERSION, _ReadFile)


class _ReadFile(argparse.Action):
    """Action that adds a file's options; options on the command line, before or after it, take precedence."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        try:
            words = read_options(Path(str(values)))
        except ConfigError as error:
            parser.error(f"{option_string}: {error}")
        of_file = parser.parse_args(words, namespace=Given())
        assert isinstance(namespace, Given)
        namespace.settings = {**of_file.settings, **namespace.settings}
        namespace.ignored += of_file.ignored
        namespace.mpi_in_file = of_file.mpi


if __name__ == "__main__":
    sys.exit(run_commandline())
