"""`farandole doctor`: reports on this machine, or on hosts and the network between each pair of them."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from farandole.config import Config
from farandole.errors import ConfigError, FarandoleError, HostsError
from farandole.launch.backend import Call, Host
from farandole.launch.backends.ssh import Ssh, SshBackend
from farandole.launch.doctor.facts import examine
from farandole.launch.doctor.pairs import Report, examine_host
from farandole.launch.doctor.report import Diagnosis
from farandole.launch.environment import with_settings
from farandole.launch.exit_codes import USAGE_ERROR
from farandole.launch.hosts import parse_hosts, read_hostfile
from farandole.launch.options import CommandParser, add_ssh_options
from farandole.launch.pickling import dump_call
from farandole.launch.run import run_call

log = logging.getLogger(__name__)

PROBLEMS = 1


def run_doctor(words: Sequence[str]) -> int:
    """Run the command with `words`, the arguments of `farandole doctor`; returns 1 if there are problems."""
    given = doctor_parser().parse_args(words)
    level = logging.INFO if given.verbose else logging.WARNING
    logging.basicConfig(level=level, format="farandole: %(message)s", stream=sys.stderr)
    try:
        diagnosis = _diagnose(given)
    except ConfigError as error:
        log.error("%s", error)
        return USAGE_ERROR
    sys.stdout.write(diagnosis.as_json() if given.json else diagnosis.as_text())
    return PROBLEMS if diagnosis.problems() else 0


def _diagnose(given: argparse.Namespace) -> Diagnosis:
    load = not given.fast
    if given.hosts is None and given.hostfile is None:
        return Diagnosis.of(["this machine"], {}, [Report(examine(load), [])])
    named = read_hostfile(Path(given.hostfile)) if given.hostfile else parse_hosts(given.hosts)
    hosts = [Host(name, 1) for name in dict.fromkeys(host.name for host in named)]
    ssh = Ssh(command=given.ssh_command, port=given.ssh_port, identity_file=given.ssh_identity_file)
    interface = {} if given.interface is None else {"interface": given.interface}
    settings = Config.from_environment(os.environ, **interface)
    unusable: dict[str, str] = {}
    while hosts:
        try:
            reports = _examine(hosts, ssh, settings, load)
            return Diagnosis.of([host.name for host in hosts], unusable, reports)
        except HostsError as error:
            unusable |= error.reasons
            hosts = [host for host in hosts if host.name not in unusable]
        except ConfigError:  # wrong use of this command
            raise
        except FarandoleError as error:
            return Diagnosis.of([], unusable | {"all others": str(error)}, [])
    return Diagnosis.of([], unusable, [])


def _examine(hosts: Sequence[Host], ssh: Ssh, settings: Config, load: bool) -> list[Report]:
    task = Call(dump_call(examine_host, (load,), {}), sys.executable, settings.start_timeout)
    backend = SshBackend(hosts, ssh, interface=settings.interface)
    environment = with_settings(os.environ, settings)
    return run_call(task, len(hosts), environment, _log_line, backend=backend)


def _log_line(rank: int, stream: str, line: str) -> None:
    log.info("host %d: %s", rank, line)


def doctor_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = CommandParser(
        prog="farandole doctor",
        description="Report on this machine: versions, frameworks, libraries, launchers, limits.\n"
        "With hosts, report on each of them, and on reachability, clocks and bandwidth\n"
        "between each pair. Ends with code 1 if there are problems.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("-H", "--hosts", metavar="HOST,...", help="hosts, as for `farandole run`; slots do not matter")
    where.add_argument("-hostfile", "--hostfile", metavar="FILE", help="file of hosts")
    parser.add_argument(
        "--network-interface", dest="interface", metavar="NAME", help="interface by which hosts connect"
    )
    parser.add_argument("--fast", action="store_true", help="show the frameworks' versions without loading them")
    parser.add_argument("--json", action="store_true", help="write JSON instead of a table")
    parser.add_argument("--verbose", action="store_true", help="log the launcher's actions")
    add_ssh_options(parser)
    return parser
