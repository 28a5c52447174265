"""Check that the user names the hosts in a job of LSF, because `jsrun` and `blaunch` are not used."""

from collections.abc import Mapping

from farandole.errors import ConfigError
from farandole.launch.hosts import is_local
from farandole.other_launchers import find_other_launch

__all__ = ["refuse_unnamed_hosts"]

VARIABLE = "LSB_MCPU_HOSTS"  # "host1 4 host2 4"


def refuse_unnamed_hosts(env: Mapping[str, str]) -> None:
    """Raise `ConfigError` in a job of several hosts, where all ranks would start on this one.

    Does nothing within a rank or one of several tasks, which start ranks on their own machine."""
    words = env.get(VARIABLE, "").split()
    hosts = dict(zip(words[::2], words[1::2], strict=False))
    if "FARANDOLE_RANK" in env or find_other_launch(env) is not None or all(map(is_local, hosts)):
        return
    named = ",".join(f"{host}:{slots}" for host, slots in hosts.items())
    raise ConfigError(
        VARIABLE, f"is {' '.join(words)}; say which of these hosts to use: -H {named}, or -H localhost:N for this one"
    )
