"""Checks of processes that an mpirun has started in a job of Kubernetes' MPI operator, or of Kubeflow Trainer.

Their controllers name the host file by a variable of Open MPI 4. Open MPI 5 ignores it, starts all ranks in the
launcher's pod, and the job is reported as complete."""

import contextlib
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from farandole.errors import ConfigError
from farandole.topology import own_addresses

VARIABLE = "OMPI_MCA_orte_default_hostfile"
_REASON = (
    "Open MPI 5 ignores this variable. Set PRTE_MCA_prte_default_hostfile={file}, or start the ranks by farandole run"
)


def require_listed_host(env: Mapping[str, str]) -> None:
    """Raise `ConfigError` when mpirun has started this process in a launcher's pod that the host file does not list."""
    slots = _slots_of_hosts(env)
    if "OMPI_COMM_WORLD_SIZE" not in env or not slots:
        return
    mine = socket.gethostname()
    if mine.partition(".")[0] in (name.partition(".")[0] for name in slots) or _is_own(slots):
        return
    raise ConfigError(
        VARIABLE,
        f"names {len(slots)} hosts in {env[VARIABLE]}, but mpirun has started ranks on {mine}, which is none of them: "
        f"{_REASON.format(file=env[VARIABLE])}",
    )


def require_hosts(env: Mapping[str, str], size: int, hosts: Sequence[str]) -> None:
    """Raise `ConfigError` when all `size` ranks are on one host, and no host of the host file has so many slots."""
    slots = _slots_of_hosts(env)
    if slots and len(set(hosts)) == 1 and size > max(slots.values()):
        raise ConfigError(
            VARIABLE,
            f"names {len(slots)} hosts in {env[VARIABLE]}, but mpirun has started all {size} ranks on one: "
            f"{_REASON.format(file=env[VARIABLE])}",
        )


def _slots_of_hosts(env: Mapping[str, str]) -> dict[str, int]:
    """Return the slots of each host of the controller's host file; none outside of such a job."""
    file = Path(env.get(VARIABLE, ""))
    if not {"K_MPI_JOB_ROLE", "KUBERNETES_SERVICE_HOST"} & set(env) or not file.is_file():
        return {}
    lines = [line.partition("#")[0].split() for line in file.read_text(encoding="utf-8").splitlines()]
    return {words[0]: _slots(words) for words in lines if words}


def _slots(words: Sequence[str]) -> int:
    text = next((word.removeprefix("slots=") for word in words if word.startswith("slots=")), "1")
    return int(text) if text.isdigit() else 1


def _is_own(names: Iterable[str]) -> bool:
    """Return whether one of `names` is an address of this pod, which may have its node's name (hostNetwork)."""
    own = set(own_addresses())
    for name in names:
        with contextlib.suppress(OSError):  # a name without an address is another pod's
            if own & {str(each[4][0]) for each in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}:
                return True
    return False
