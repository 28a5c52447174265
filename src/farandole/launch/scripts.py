"""Scripts that print the hosts there are, one word for each."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from farandole.errors import ConfigError
from farandole.launch.backend import Host
from farandole.launch.hosts import parse_hosts

OPTION = "host_discovery_script"
SECONDS = 30  # for one run of the script


def run_script(script: Path) -> Sequence[str]:
    """Return the words that `script` prints; raises `ConfigError` when it fails.

    Executes the script; one that is not executable, as a file of a ConfigMap, is a script of sh."""
    # By sh, which takes scripts without "#!", too.
    words = ["sh", "-c", '"$0"', str(script.absolute())] if os.access(script, os.X_OK) else ["sh", str(script)]
    try:
        # Bytes that are no text end in an error about that host, not in one of Python's decoder.
        done = subprocess.run(
            words, capture_output=True, text=True, errors="backslashreplace", timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(OPTION, f"{script} did not end within {SECONDS} s") from error
    if done.returncode != 0:
        raise ConfigError(OPTION, f"{script} failed with code {done.returncode}: {done.stderr.strip()}")
    return done.stdout.split()


def parse_script_hosts(lines: Sequence[str], slots: int) -> tuple[Host, ...]:
    """Return the hosts in `lines`, each "host" or "host:slots"; a host without a number has `slots`."""
    return tuple(host for line in lines for host in parse_hosts(line, OPTION, slots))
