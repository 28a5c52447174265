"""The `farandole` command; above all `farandole run -np 2 python train.py`: a program on N ranks of this machine."""

import argparse
import logging
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

import farandole
from farandole.config import LOG_LEVELS, Config
from farandole.errors import ConfigError, SlotsError
from farandole.launch.backend import Command
from farandole.launch.backends import choose_backend
from farandole.launch.environment import with_settings
from farandole.launch.failures import Failure
from farandole.launch.installed import report
from farandole.launch.job import open_job
from farandole.launch.options import Given, add_horovod_options, add_setting_options
from farandole.launch.output import Output
from farandole.launch.timeline_command import run_timeline

__all__ = ["launch", "main", "run_parser"]

VERSION = f"farandole {farandole.__version__}"

log = logging.getLogger(__name__)

USAGE_ERROR, NOT_EXECUTABLE, NOT_FOUND, INTERRUPTED = 2, 126, 127, 130
_LEVELS = dict(zip(LOG_LEVELS, (5, logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, 50), strict=True))


class _Signaled(BaseException):
    """This launcher was asked to end by `number`; as Ctrl-C, nothing on the way may take it for a failure."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def main(arguments: Sequence[str] | None = None) -> int:
    """The `farandole` command; returns its exit code: of `run` that of the rank that failed first, 128 + its signal."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if _farandole_parser().parse_args(words[:1]).command == "timeline":
        return run_timeline(words[1:])
    return launch(run_parser(), words[1:], os.environ)


def launch(parser: argparse.ArgumentParser, words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Do what `words`, read by a `run_parser`, say, with ranks that get `environment`; returns the exit code."""
    given = parser.parse_args(words, namespace=Given())
    _log_to_stderr(given)
    if given.check_build:
        sys.stdout.write(report())
        return 0
    if given.num_proc is None:
        parser.error("the number of ranks is missing: -np N")
    if given.command[:1] == ["--"]:
        del given.command[0]
    if not given.command:
        parser.error(f"the program to run is missing: {parser.prog} -np 2 python train.py")
    for sentence in given.ignored:
        log.warning("%s", sentence)
    try:
        return _run(given, given.num_proc, environment)
    except (ConfigError, SlotsError) as error:
        log.error("%s", error)
        return USAGE_ERROR


def _run(given: Given, num_proc: int, environment: Mapping[str, str]) -> int:
    backend = choose_backend(given.hosts, given.hostfile, num_proc)
    settings = Config.from_environment(environment, **given.settings)
    environment = with_settings(environment, settings, given.settings)
    unusable = _check_program(given.command[0], environment)
    if unusable is not None:
        return unusable
    directory = None if given.output_filename is None else Path(given.output_filename)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup means it
            signal.signal(number, _signaled)
    try:
        with (
            Output(num_proc, timestamp=given.timestamp, directory=directory) as output,
            open_job(num_proc, environment, backend=backend, binding=given.binding) as job,
        ):
            failure = job.run(Command(given.command), output)
    except KeyboardInterrupt:
        log.error("interrupted; all ranks have been ended")
        return INTERRUPTED
    except _Signaled as end:
        log.error("ended by %s; all ranks have been ended", signal.Signals(end.number).name)
        return 128 + end.number
    if failure is None:
        return 0
    _report(failure, num_proc)
    return failure.code


def _signaled(number: int, frame: FrameType | None) -> NoReturn:
    raise _Signaled(number)


def _report(failure: Failure, num_proc: int) -> None:
    error = failure.error()
    if num_proc == 1:
        error.tail = ()  # they stand right above
    log.error("%s", error)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # Python would try again when it ends, and complain about it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _check_program(program: str, environment: Mapping[str, str]) -> int | None:
    """Say once, and before anything is started, what every rank would stumble over; gives the exit code then."""
    path = environment.get("PATH", os.defpath)
    if shutil.which(program, path=path) is not None:
        return None
    if not Path(program).is_file():
        where = "there is no such file" if os.sep in program else f"it is in no directory of PATH ({path})"
        log.error("cannot run %r: %s", program, where)
        return NOT_FOUND
    hint = f"; did you mean: python {program}" if program.endswith(".py") else ""
    where = "the file is not executable" if os.sep in program else "the file here is not on PATH"
    log.error("cannot run %r: %s%s", program, where, hint)
    return NOT_EXECUTABLE


def _log_to_stderr(given: Given) -> None:
    level = given.settings.get("log_level", "info" if given.verbose else "warning")
    logging.addLevelName(_LEVELS["trace"], "TRACE")
    logging.basicConfig(level=_LEVELS[level], format="farandole: %(message)s", stream=sys.stderr)


def _farandole_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="farandole", usage="farandole run|timeline ...")
    parser.add_argument("-v", "--version", action="version", version=VERSION)
    parser.add_argument(
        "command",
        choices=["run", "timeline"],
        help="run: a program on several ranks; timeline: what the timelines of ranks tell; each has its own --help",
    )
    return parser


def run_parser(
    prog: str = "farandole run", version: str = VERSION, config_file: type[argparse.Action] | None = None
) -> argparse.ArgumentParser:
    """Return what reads the command line of `prog`, for `launch`; `config_file` takes the option of that name."""
    run = argparse.ArgumentParser(
        prog=prog,
        allow_abbrev=False,
        usage=f"{prog} -np N [options] command ...",
        description="Run a program as N ranks on this machine. The first rank that fails ends all others, and its "
        "exit code (128 + signal for a killed one) is that of this command. No process of a rank survives it.",
        epilog="Other options of horovodrun are accepted with a warning where they have lost their meaning, and "
        "refused by name where they cannot be fulfilled.",
    )
    ranks = run.add_argument_group("ranks")
    ranks.add_argument("-np", "--num-proc", type=_count, metavar="N", help="how many ranks to start")
    where = ranks.add_mutually_exclusive_group()
    where.add_argument("-H", "--hosts", metavar="HOST:SLOTS,...", help="where; only this machine so far")
    where.add_argument("-hostfile", "--hostfile", metavar="FILE", help="the same, as lines of 'host slots=2'")
    ranks.add_argument(
        "--binding",
        choices=("none", "cores"),
        default="none",
        help="cores: each rank runs on its own share of this machine's cores (default: none)",
    )
    output = run.add_argument_group("output")
    output.add_argument(
        "--output-filename", metavar="DIRECTORY", help="write DIRECTORY/rank.N/stdout and stderr as well"
    )
    output.add_argument(
        "-prefix-timestamp",
        "--prefix-output-with-timestamp",
        dest="timestamp",
        action="store_true",
        help="put the time before each line",
    )
    output.add_argument("--verbose", action="store_true", help="say what the launcher does")
    about = run.add_argument_group("information")
    about.add_argument("-v", "--version", action="version", version=version)
    about.add_argument("-cb", "--check-build", action="store_true", help="show what is installed, and stop")
    add_setting_options(run.add_argument_group("settings", "each also a variable: --spin is FARANDOLE_SPIN"))
    if config_file is not None:
        run.add_argument("--config-file", action=config_file, metavar="FILE", help="options as a file of YAML")
    add_horovod_options(run, but=() if config_file is None else ("--config-file",))
    run.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return run


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
