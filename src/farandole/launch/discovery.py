"""Elastic options of `horovodrun`, for a job of a fixed size whose hosts a script names."""

import argparse
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from farandole.errors import ConfigError, SlotsTimeout
from farandole.launch.backend import Host
from farandole.launch.hosts import parse_hosts
from farandole.refusals import ELASTIC

__all__ = ["Discovery", "add_discovery_options", "run_script"]

OPTION = "host_discovery_script"
SECONDS = 30  # for one run of the script
PAUSE = 1.0  # seconds between two runs of the script


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovery:
    """The given options about a job's size and hosts."""

    least: int | None
    most: int | None
    slots: int | None  # of a host for which the script names no number
    script: Path | None
    patience: timedelta | None

    @classmethod
    def of(cls, given: argparse.Namespace) -> "Discovery":
        """Return the options of the command line."""
        script, seconds = given.discovery_script, given.elastic_timeout
        return cls(
            least=given.min_num_proc,
            most=given.max_num_proc,
            slots=given.slots_per_host,
            script=None if script is None else Path(script),
            patience=None if seconds is None else timedelta(seconds=seconds),
        )

    def check(self, num_proc: int | None) -> None:
        """Raise `ConfigError` for options that allow the number of ranks to change."""
        for name, value in (("min_np", self.least), ("max_np", self.most)):
            if value is not None and value != num_proc:
                asked = "there is no -np" if num_proc is None else f"-np is {num_proc}"
                raise ConfigError(name, f"is {value}, but {asked}: {ELASTIC}; give both the same number")

    def wait(self, num_proc: int, timeout: timedelta) -> str | None:
        """Return the script's hosts in the form of -H once they have slots for `num_proc` ranks; None without a script.

        Runs the script again until then. Blocks up to `patience`, or else `timeout`; then raises `SlotsTimeout`."""
        if self.script is None:
            return None
        deadline = time.monotonic() + (timeout if self.patience is None else self.patience).total_seconds()
        while True:
            hosts = parse_script_hosts(run_script(self.script), self.slots or 1)
            free = sum(host.slots for host in hosts)
            if free >= num_proc:
                return ",".join(
                    f"[{host.name}]:{host.slots}" if ":" in host.name else f"{host.name}:{host.slots}" for host in hosts
                )
            if time.monotonic() >= deadline:
                raise SlotsTimeout(num_proc, free, f"the hosts of {self.script}")
            time.sleep(min(PAUSE, max(0.0, deadline - time.monotonic())))


def add_discovery_options(parser: argparse.ArgumentParser) -> None:
    """Accept the elastic options that describe a job of a fixed size; `Discovery.check` refuses others."""
    for flags, name in (
        (("--min-np", "--min-num-proc"), "min_num_proc"),
        (("--max-np", "--max-num-proc"), "max_num_proc"),
        (("--slots-per-host", "--slots"), "slots_per_host"),
        (("--elastic-timeout",), "elastic_timeout"),
    ):
        parser.add_argument(*flags, type=int, dest=name, help=argparse.SUPPRESS)
    parser.add_argument("--host-discovery-script", dest="discovery_script", help=argparse.SUPPRESS)


def run_script(script: Path) -> Sequence[str]:
    """Return the words that `script` prints; raises `ConfigError` when it fails.

    Executes the script; one that is not executable, as a file of a ConfigMap, is a script of sh."""
    # By sh, which takes scripts without "#!", too.
    words = ["sh", "-c", '"$0"', str(script.absolute())] if os.access(script, os.X_OK) else ["sh", str(script)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(OPTION, f"{script} did not end within {SECONDS} s") from error
    if done.returncode != 0:
        raise ConfigError(OPTION, f"{script} failed with code {done.returncode}: {done.stderr.strip()}")
    return done.stdout.split()


def parse_script_hosts(lines: Sequence[str], slots: int) -> tuple[Host, ...]:
    """Return the hosts in `lines`, each "host" or "host:slots"; a host without a number has `slots`."""
    found: list[Host] = []
    for line in lines:
        bare = ":" not in line or line.endswith("]")
        found += parse_hosts(f"{line}:{slots}" if bare else line)
    return tuple(found)
