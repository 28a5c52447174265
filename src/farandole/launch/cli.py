"""The `farandole` command: `farandole run -np 2 python train.py` runs a program as N ranks."""

import argparse
import contextlib
import functools
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from pkgutil import resolve_name
from types import FrameType
from typing import NamedTuple, NoReturn, cast

import farandole
from farandole.config import Config
from farandole.cores import available_cores
from farandole.errors import ConfigError, HostsError, SlotsError
from farandole.launch.attempts import Attempts
from farandole.launch.backend import Command
from farandole.launch.backends import choose_backend, find_site, named_hosts, variables_of_ranks
from farandole.launch.backends.ssh import Ssh
from farandole.launch.elastic.job import ElasticJob
from farandole.launch.elastic.options import Elastic, add_elastic_options
from farandole.launch.environment import refuse_mpi, with_settings
from farandole.launch.exit_codes import INTERRUPTED, NOT_EXECUTABLE, NOT_FOUND, OUTPUT_LOST, USAGE_ERROR
from farandole.launch.failures import Failure
from farandole.launch.hosts import is_local
from farandole.launch.installed import report
from farandole.launch.job import Job, open_job
from farandole.launch.options import (
    AUTO,
    CommandParser,
    Given,
    add_horovod_options,
    add_setting_options,
    add_ssh_options,
    rank_count,
    ranks_named,
    whole_number,
)
from farandole.launch.output import Output, prepare_streams
from farandole.launch.starters import STARTERS, find_starter
from farandole.log_level import LEVELS

VERSION = f"farandole {farandole.__version__}"

log = logging.getLogger(__name__)


class Subcommand(NamedTuple):
    """A command: its description, and as "module:function" what runs it with its words, and what makes its parser."""

    about: str
    run: str
    parser: str


def _subcommand(module: str, name: str, about: str) -> Subcommand:
    return Subcommand(about, f"farandole.{module}:run_{name}", f"farandole.{module}:{name}_parser")


# By name, since `farandole run` starts without cloudpickle and rich, which others need.
COMMANDS: Mapping[str, Subcommand] = {
    "run": Subcommand(
        "run a program as N ranks, on this machine or on others", f"{__name__}:run_program", f"{__name__}:run_parser"
    ),
    "demo": _subcommand("launch.demo", "demo", "train a small model on this machine, and watch it"),
    "doctor": _subcommand(
        "launch.doctor.command", "doctor", "report on this machine, or on hosts and the network between them"
    ),
    "timeline": _subcommand(
        "launch.timeline_command", "timeline", "make a trace, a page, or Horovod's form of the timelines of ranks"
    ),
    "check": _subcommand("compat.check", "check", "say what becomes of each name of Horovod in a program"),
    "as-horovod": _subcommand(
        "compat.as_horovod", "as_horovod", "answer `import horovod` in all processes of an environment"
    ),
    "completion": _subcommand(
        "launch.completion", "completion", "print a script that completes this command in a shell"
    ),
}
ABOUT = f"""Synchronous data-parallel training: starts one program as several ranks and
connects them.

commands:
{chr(10).join(f"  {name:10} {command.about}" for name, command in COMMANDS.items())}

farandole COMMAND --help shows the command's options.
"""
READ_ON = """examples:
  farandole run -np 4 python train.py
  farandole run -np 4 --binding cores --output-filename logs python train.py
  farandole run -np 8 -H node1:4,node2:4 python train.py
  farandole run -np 4 --timeline trace.json python train.py
  farandole timeline report trace.json
  farandole doctor -H node1,node2
  farandole check train.py

read on, each with its names, arguments and defaults:
  python -m pydoc farandole.torch          PyTorch; also .tensorflow .keras .jax
  python -m pydoc farandole.data           data sets and DataFrames
  python -m pydoc farandole.spark          ranks and estimators on Spark
  farandole run --help                     all settings
"""
RUN_EXAMPLES = """examples:
  farandole run -np 4 python train.py --epochs 3
  farandole run -np 2 --timeline trace.json python -m package.train

Each option of a setting has a variable, too: --spin is FARANDOLE_SPIN.
horovodrun's other options are accepted with a warning where they have no
meaning here, and refused by name where farandole cannot do what they ask for.
"""


class _Signaled(BaseException):
    """This launcher has received the signal `number`. Like KeyboardInterrupt, it must pass handlers of failures."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the `farandole` command; return its exit code. That of `run` is the code of the rank that failed first."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    run: Callable[[Sequence[str]], int] = resolve_name(COMMANDS[_farandole_parser().parse_args(words[:1]).command].run)
    return run(words[1:])


def run_program(words: Sequence[str]) -> int:
    """Run a program as ranks; `words` are the arguments of `farandole run`."""
    return launch(run_parser(), words, os.environ)


def launch(
    parser: argparse.ArgumentParser,
    words: Sequence[str],
    environment: Mapping[str, str],
    output: type[Output] = Output,
) -> int:
    """Parse `words` with `parser` and run the program as ranks with `environment`; return the exit code.

    `output` prints the lines of the ranks."""
    prepare_streams()
    given = parser.parse_args(words, namespace=Given())
    _log_to_stderr(given, environment)
    if given.check_build:
        sys.stdout.write(report())
        return 0
    if given.command[:1] == ["--"]:
        del given.command[0]
    if not given.command:
        parser.error(f"the program to run is missing: {parser.prog} -np 2 python train.py")
    starter = find_starter(given)
    unused = [sentence for each in STARTERS if each is not starter for sentence in each.without_meaning(given)]
    for sentence in given.ignored + unused:
        log.warning("%s", sentence)
    try:
        elastic = Elastic.of(given)
        site = find_site(environment) if given.hosts is None else None
        counted = elastic.asked or (site is not None and site.counts_slots)
        if given.num_proc is None and (starter is not None or not counted):
            parser.error("the number of ranks is missing: -np N")
        settings = Config.from_environment(environment, **given.settings)
        if given.num_proc == AUTO:
            given.num_proc = _count_ranks(given, site is not None, settings.start_timeout)
        if starter is not None:
            if elastic.asked:
                parser.error("mpirun ends all ranks when one is lost: leave --mpi out, or the options of elastic jobs")
            if given.output_filter is not None or given.max_restarts:
                parser.error("mpirun prints all lines and starts once: leave --output-filter and --max-restarts out")
            starter.start(given, given.hosts, settings, environment)
        return _run(given, elastic, settings, environment, output)
    except (ConfigError, HostsError, SlotsError) as error:
        log.error("%s", error)
        return USAGE_ERROR


def _run(given: Given, elastic: Elastic, settings: Config, environment: Mapping[str, str], kind: type[Output]) -> int:
    ssh = Ssh(command=given.ssh_command, port=given.ssh_port, identity_file=given.ssh_identity_file)
    ranks = with_settings(variables_of_ranks(environment), settings, given.settings)
    num_proc, here = given.num_proc, False
    open_attempt: Callable[[Mapping[str, str]], AbstractContextManager[Job | ElasticJob]]
    if elastic.asked:
        limits = elastic.limits(num_proc, settings)
        num_proc, most = limits.wanted, limits.most
        open_attempt = functools.partial(
            elastic.open_job, num_proc, settings=settings, hosts=given.hosts, hostfile=given.hostfile, shell=ssh
        )
    else:
        backend = choose_backend(given.hosts, given.hostfile, num_proc, ssh, settings.interface, settings.start_timeout)
        num_proc = most = num_proc or sum(host.slots for host in backend.hosts)
        here = all(is_local(host.name) for host in backend.hosts)
        open_attempt = functools.partial(open_job, num_proc, backend=backend, binding=given.binding)
    if given.output_filter and max(given.output_filter) >= most:
        raise ConfigError("output_filter", f"names rank {max(given.output_filter)} of {most}, counted from 0")
    refuse_mpi(settings, num_proc)
    # Other hosts may have a program that this machine lacks.
    unusable = _check_program(given.command[0], ranks) if here else None
    if unusable is not None:
        return unusable
    directory = None if given.output_filename is None else Path(given.output_filename)
    attempts = Attempts(given.max_restarts, settings.timeline)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # ignored on purpose, as below nohup
            signal.signal(number, _signaled)
    try:
        with (
            kind(num_proc, timestamp=given.timestamp, directory=directory, shown=given.output_filter) as output,
        ):
            attempts.run(open_attempt, ranks, Command(given.command), output)
    except KeyboardInterrupt:
        log.error("interrupted; all ranks have been ended")
        return INTERRUPTED
    except _Signaled as end:
        log.error("ended by %s; all ranks have been ended", signal.Signals(end.number).name)
        return 128 + end.number
    except ConfigError as error:
        if not attempts.code:
            raise
        _report(attempts.failures, num_proc)
        log.error("%s", error)  # the problem at the end of the job: an output file lacks lines
        return attempts.code
    if attempts.code:
        _report(attempts.failures, num_proc)
    elif output.refused is not None:  # by ranks that ended well before they could be ended
        log.error("no rank failed, but lines of the ranks are lost: %s", output.refused)
        _drop_unwritten()
        return OUTPUT_LOST
    return attempts.code


def _count_ranks(given: Given, at_site: bool, timeout: timedelta) -> int:
    """Return the number of slots of the named hosts or those of the site, else of usable cores of this machine."""
    if not at_site and given.hosts is None and given.hostfile is None:
        return available_cores()
    return sum(host.slots for host in named_hosts(given.hosts, given.hostfile, AUTO, timeout))


def _signaled(number: int, frame: FrameType | None) -> NoReturn:
    raise _Signaled(number)


def _report(failures: Sequence[Failure], num_proc: int) -> None:
    error = failures[-1].error([f"rank {each.rank} failed: {each.reason}" for each in failures[:-1]])
    if num_proc == 1:
        error.tail = ()  # the rank's last lines were printed just before
    log.error("%s", error)
    _drop_unwritten()


def _drop_unwritten() -> None:
    """Leave nothing in the buffer of standard output that cannot be written."""
    try:
        sys.stdout.flush()
    except OSError:
        # Otherwise Python would flush again when it ends, and print an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _check_program(program: str, environment: Mapping[str, str]) -> int | None:
    """Return the exit code, and log the reason once, when no rank could execute `program`; else None."""
    path = environment.get("PATH", os.defpath)
    if shutil.which(program, path=path) is not None:
        return None
    if Path(program).is_dir() and os.sep in program:
        log.error("cannot run %r: it is a folder; name a program in it", program)
        return NOT_EXECUTABLE
    if not Path(program).is_file():
        where = "there is no such file" if os.sep in program else f"it is in no directory of PATH ({path})"
        log.error("cannot run %r: %s", program, where)
        return NOT_FOUND
    hint = f"; did you mean: python {program}" if program.endswith(".py") else ""
    where = "the file is not executable" if os.sep in program else "the file here is not on PATH"
    log.error("cannot run %r: %s%s", program, where, hint)
    return NOT_EXECUTABLE


def _log_to_stderr(given: Given, environment: Mapping[str, str]) -> None:
    setting = next(each for each in Config.settings() if each.name == "log_level")
    named = given.settings.get("log_level")
    with contextlib.suppress(ConfigError):  # `launch` reports a wrong level with the other settings
        named = named or cast(str | None, setting.read(environment))
    level = named or ("info" if given.verbose else "warning")
    logging.addLevelName(LEVELS["trace"], "TRACE")
    logging.basicConfig(level=LEVELS[level], format="farandole: %(message)s", stream=sys.stderr)


def _farandole_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="farandole",
        usage="farandole COMMAND ...",
        description=ABOUT,
        epilog=READ_ON,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-v", "--version", action="version", version=VERSION)
    parser.add_argument("command", choices=list(COMMANDS), help=argparse.SUPPRESS)
    return parser


def run_parser(
    prog: str = "farandole run", version: str = VERSION, config_file: type[argparse.Action] | None = None
) -> argparse.ArgumentParser:
    """Return the parser of `prog`, for `launch`; `config_file` is the action of the option of that name."""
    run = CommandParser(
        prog=prog,
        allow_abbrev=False,
        usage=f"{prog} -np N [options] command ...",
        description="Run a program as N ranks, on this machine or by ssh on others. When a rank\n"
        "fails, all others are ended, and its exit code (128 + signal for a killed rank)\n"
        "becomes that of this command. No process of a rank survives it.",
        epilog=RUN_EXAMPLES.replace("farandole run", prog),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_rank_options(run)
    add_elastic_options(run)
    add_ssh_options(run)
    for starter in STARTERS:
        starter.add_options(run)
    _add_output_options(run)
    about = run.add_argument_group("information")
    about.add_argument("-v", "--version", action="version", version=version)
    about.add_argument("-cb", "--check-build", action="store_true", help="show the installed parts and exit")
    add_setting_options(run)
    if config_file is not None:
        run.add_argument("--config-file", action=config_file, metavar="FILE", help="options as a file of YAML")
    add_horovod_options(run, but=() if config_file is None else ("--config-file",))
    run.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return run


def _add_rank_options(parser: argparse.ArgumentParser) -> None:
    ranks = parser.add_argument_group("ranks")
    ranks.add_argument(
        "-np",
        "--num-proc",
        "--nproc",
        type=rank_count,
        metavar="N",
        help="number of ranks; auto: one in each slot of the hosts, or for each core of this machine that may be used. "
        "May be left out in a launcher's pod of Kubernetes' MPI operator, for one in each slot",
    )
    where = ranks.add_mutually_exclusive_group()
    where.add_argument(
        "-H",
        "--hosts",
        metavar="HOST:SLOTS,...",
        help="hosts and their slots; others than this machine are reached by ssh",
    )
    where.add_argument("-hostfile", "--hostfile", metavar="FILE", help="file of hosts, as lines of 'host slots=2'")
    ranks.add_argument(
        "--binding",
        choices=("none", "cores"),
        default="none",
        help="cores: each rank runs on its own share of this machine's cores (default: none)",
    )
    ranks.add_argument(
        "--max-restarts",
        type=whole_number,
        default=0,
        metavar="N",
        help="start all ranks again after a failure, up to N times; TORCHELASTIC_RESTART_COUNT counts them from 0 for "
        "the ranks (default: 0)",
    )


def _add_output_options(parser: argparse.ArgumentParser) -> None:
    output = parser.add_argument_group("output")
    output.add_argument("--output-filename", metavar="DIRECTORY", help="also write DIRECTORY/rank.N/stdout and stderr")
    output.add_argument(
        "--output-filter",
        type=ranks_named,
        metavar="RANKS",
        help="show the lines of these ranks only, such as rank0 or 0,4-7; files get all lines",
    )
    output.add_argument(
        "-prefix-timestamp",
        "--prefix-output-with-timestamp",
        dest="timestamp",
        action="store_true",
        help="put the time before each line",
    )
    output.add_argument("--verbose", action="store_true", help="log the launcher's actions")


if __name__ == "__main__":
    sys.exit(main())
