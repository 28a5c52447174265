"""Hosts of a job of LSF, which the user has to name, because `jsrun` and `blaunch` are not used."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

from farandole.errors import ConfigError
from farandole.launch.backend import Host, Site
from farandole.launch.hosts import is_local

VARIABLE = "LSB_MCPU_HOSTS"  # "host1 4 host2 4"


@dataclass(frozen=True, slots=True)
class LsfJob(Site):
    """A job of LSF: its hosts and the slots of each, in turn."""

    words: Sequence[str]

    @classmethod
    def read(cls, env: Mapping[str, str]) -> Self | None:
        """Return the job, if there is one."""
        words = env.get(VARIABLE, "").split()
        return cls(words) if words else None

    def wait_for_hosts(self, num_proc: int | None, timeout: timedelta) -> tuple[Host, ...]:
        """Return this machine with a slot for each rank if it is the only host.

        Otherwise all ranks would start on this one: raises `ConfigError`, with the options that name the hosts."""
        if num_proc and all(map(is_local, self.words[::2])):
            return (Host("localhost", num_proc),)
        # A host may be listed several times, which -H allows, too.
        named = ",".join(f"{host}:{slots}" for host, slots in zip(self.words[::2], self.words[1::2], strict=False))
        raise ConfigError(
            VARIABLE,
            f"is {' '.join(self.words)}; say which of these hosts to use: -H {named}, or -H localhost:N for this one",
        )
