"""Options of an elastic job, of the command line and of `farandole.run`, and the job that they ask for."""

import argparse
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypedDict

from farandole.config import Config
from farandole.errors import ConfigError
from farandole.launch.backend import Backend, Host, Shell
from farandole.launch.backends import chosen_site, named_hosts, reach
from farandole.launch.elastic.hosts import FixedHosts, HostDiscovery, HostScript
from farandole.launch.elastic.job import ElasticJob, open_elastic_job
from farandole.launch.elastic.joining import Record
from farandole.launch.elastic.roster import Limits
from farandole.launch.environment import warn_of_copies

COOLDOWN = (1.0, 300.0)  # seconds


class ElasticArguments(TypedDict, total=False):
    """Arguments of `farandole.run` for the fields of `Elastic`."""

    min_num_proc: int | None
    max_num_proc: int | None
    slots: int | None
    host_discovery_script: str | os.PathLike[str] | None
    reset_limit: int | None
    cooldown_range: Sequence[float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Elastic:
    """The given options about a job whose size may change; None: not given."""

    min_num_proc: int | None = None
    max_num_proc: int | None = None
    slots: int | None = None  # of a host for which the script names no number
    host_discovery_script: str | os.PathLike[str] | None = None
    reset_limit: int | None = None
    cooldown_range: Sequence[float] | None = None  # seconds
    survive_launcher: bool = False
    join: str | None = None  # the name of a job that has lost its launcher, or "last"

    def __post_init__(self) -> None:
        least, most = self.cooldown
        if not 0 < least <= most:
            raise ConfigError("cooldown_range", f"must be two rising numbers above 0, got {least:g} {most:g}")
        if self.reset_limit is not None and self.reset_limit < 0:
            raise ConfigError("reset_limit", f"must be >= 0, got {self.reset_limit}")

    @classmethod
    def of(cls, given: argparse.Namespace) -> "Elastic":
        """Return the options of the command line."""
        return cls(
            min_num_proc=given.min_num_proc,
            max_num_proc=given.max_num_proc,
            slots=given.slots_per_host,
            host_discovery_script=given.discovery_script,
            reset_limit=given.reset_limit,
            cooldown_range=given.cooldown_range,
            survive_launcher=given.survive_launcher,
            join=given.join,
        )

    @property
    def cooldown(self) -> tuple[float, float]:
        """The shortest and longest rest of a host, in seconds."""
        least, most = COOLDOWN if self.cooldown_range is None else self.cooldown_range
        return least, most

    @property
    def asked(self) -> bool:
        """Whether the job may lose and gain ranks: any option but the number of slots says so."""
        asking = (
            self.min_num_proc,
            self.max_num_proc,
            self.host_discovery_script,
            self.reset_limit,
            self.cooldown_range,
        )
        return self.survive_launcher or self.join is not None or any(each is not None for each in asking)

    def limits(self, num_proc: int | None, settings: Config) -> Limits:
        """Return the limits of a job that begins with `num_proc` ranks; raises `ConfigError` for sizes out of order.

        Without a least or most number of ranks it is `num_proc`, or else the other one."""
        sizes = [size for size in (num_proc, self.min_num_proc, self.max_num_proc) if size is not None]
        if not sizes:
            raise ConfigError("num_proc", "name the number of ranks: -np N")
        wanted = sizes[0]
        least = wanted if self.min_num_proc is None else self.min_num_proc
        most = max(wanted, least) if self.max_num_proc is None else self.max_num_proc
        if not 1 <= least <= wanted <= most:
            raise ConfigError("num_proc", f"is {wanted}, and must lie between min_np {least} (>= 1) and max_np {most}")
        return Limits(
            least=least,
            most=most,
            wanted=wanted,
            start=settings.start_timeout.total_seconds(),
            patience=settings.elastic_timeout.total_seconds(),
            resets=self.reset_limit,
            cooldown=self.cooldown,
        )

    def open_job(
        self,
        num_proc: int | None,
        environment: Mapping[str, str],
        settings: Config,
        *,
        hosts: str | None,
        hostfile: str | os.PathLike[str] | None,
        shell: Shell,
    ) -> AbstractContextManager[ElasticJob]:
        """Prepare the job on the hosts of the script, else on those named, those of the site, or this machine."""
        limits = self.limits(num_proc, settings)
        warn_of_copies(environment)
        site = chosen_site(hosts, hostfile)
        reaching = shell if site is None else site.shell(shell, settings.start_timeout)
        discovery: HostDiscovery
        if self.host_discovery_script is not None:
            discovery = HostScript(self.host_discovery_script, self.slots)
        else:
            found = named_hosts(hosts, hostfile, limits.most, settings.start_timeout)
            slots: Counter[str] = Counter()  # a host may be named several times, as for other jobs
            for host in found:
                slots[host.name] += host.slots
            discovery = FixedHosts(slots)

        def backend_of(host: Host) -> Backend:
            return reach([host], host.slots, reaching, settings.interface)

        record = None if self.join is None else Record.find(self.join)
        record = Record() if record is None and self.survive_launcher else record
        return open_elastic_job(limits, discovery, backend_of, environment, record)


def add_elastic_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of elastic jobs, as a group."""
    group = parser.add_argument_group("elastic", "a job that goes on when ranks are lost, and takes in new ones")
    for flags, help in (
        (("--min-np", "--min-num-proc"), "ranks without which the training waits (default: -np)"),
        (("--max-np", "--max-num-proc"), "ranks that the job grows to (default: -np)"),
        (("--slots-per-host", "--slots"), "slots of a host for which the script prints no number (default: 1)"),
        (("--reset-limit",), "end the job after so many changes of its ranks (default: none)"),
    ):
        name = flags[-1].removeprefix("--").replace("-", "_")
        name = "slots_per_host" if name == "slots" else name
        group.add_argument(*flags, type=int, dest=name, metavar="N", help=help)
    group.add_argument(
        "--host-discovery-script",
        dest="discovery_script",
        metavar="FILE",
        help="program that prints the hosts there are now, as lines of 'host' or 'host:slots'; it runs each second",
    )
    group.add_argument(
        "--blacklist-cooldown-range",
        dest="cooldown_range",
        type=float,
        nargs=2,
        metavar=("LEAST", "MOST"),
        help="seconds for which a host gets no ranks after its first failure, and at most after many (default: 1 300)",
    )
    group.add_argument(
        "--survive-launcher",
        action="store_true",
        help="go on with the ranks that are there if this command is killed (kill -9), until fewer than --min-np are "
        "left; Ctrl-C, SIGTERM and a hangup end all ranks as ever",
    )
    group.add_argument(
        "--join",
        metavar="JOB",
        help="take over a job that was started with --survive-launcher here and has lost its launcher: its name, which "
        "is that of its folder in ~/.local/state/farandole, or 'last'",
    )
