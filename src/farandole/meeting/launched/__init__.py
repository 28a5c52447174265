"""Choice of the rendezvous by the launcher of this process: farandole's own, mpirun, srun, torchrun, or Kubernetes for
the pods of an Indexed Job."""

import importlib
import logging
import os
from collections.abc import Mapping
from typing import Protocol

from farandole.config import Config
from farandole.errors import ConfigError
from farandole.meeting.frames import Deadline
from farandole.meeting.launched.communicators import Communicator, warn_of_lone_processes
from farandole.meeting.launched.elastic import MemberEnvironment, meet_in_elastic_job
from farandole.meeting.launched.hosted import HostedRendezvous, meet
from farandole.meeting.launched.indexed_job import warn_of_lone_pods
from farandole.meeting.launched.mpi import MpiExchange
from farandole.meeting.launched.operator import require_listed_host
from farandole.meeting.rendezvous import Rendezvous, from_environment
from farandole.other_launchers import CLUSTERS, OtherLaunch, find_other_launch, refuse_launch_below_member
from farandole.topology import JobEnvironment

__all__ = ["Meet", "find_rendezvous"]


log = logging.getLogger(__name__)


class Meet(Protocol):
    """The function that a row of `other_launchers` names: it lets the processes of the launch meet."""

    def __call__(self, found: OtherLaunch, config: Config, env: Mapping[str, str]) -> Rendezvous:
        """Return this rank's rendezvous; blocks up to `config.start_timeout`. Raises `ConfigError` if the launcher's
        means are not available, and `RendezvousError` for ranks that do not find rank 0."""
        ...


def find_rendezvous(
    config: Config, env: Mapping[str, str] | None = None, communicator: Communicator | None = None
) -> Rendezvous:
    """Make the rendezvous for the variables that a launcher has set in `env` (default: `os.environ`).

    Without a launcher this process is the only rank. Processes of mpirun, srun or torchrun get rank 0's address and a
    new secret through an exchange of the launcher (MPI, a shared folder, torch's store), and then meet at rank 0.
    That blocks until all have arrived, up to `config.start_timeout`. Pods of an Indexed Job meet at rank 0's host
    name, in the first all-gather. A member of an elastic job waits for its place as long as its launcher does. With a
    `communicator` of MPI its processes meet, in its order. Raises `ConfigError` if the exchange is not available or
    connects fewer processes than the launcher has started, and `RendezvousError` for ranks that do not find rank 0."""
    env = os.environ if env is None else env
    member = MemberEnvironment.read(env)
    if member is not None:
        refuse_launch_below_member(env)
        return meet_in_elastic_job(member, config)
    job = JobEnvironment.read(env)
    if job is not None:
        if job.rank == 0:
            warn_of_lone_processes(job.size)
        return from_environment(env)
    require_listed_host(env)
    found = find_other_launch(env)
    if communicator is not None and (communicator.Get_size() > 1 or (found is not None and found.by_mpi)):
        deadline = Deadline(config.start_timeout)
        return meet(MpiExchange(found, config.mpi_library, deadline, communicator), config, deadline, found)
    found = found or find_other_launch(env, CLUSTERS)
    if found is None:
        warn_of_lone_pods(env)
    if found is None or not found.launcher.meet:
        return from_environment(env)
    met = _load(found)(found, config, env)
    if isinstance(met, HostedRendezvous):
        _warn_of_containers(found, met, env)
    return met


def _warn_of_containers(found: OtherLaunch, met: HostedRendezvous, env: Mapping[str, str]) -> None:
    """Warn if the launcher counts more processes on this machine before this one than there are ranks on its host.

    Programs choose their GPU by `local_rank()`, so several of them would use the same one."""
    theirs, ours = found.local_rank(env), met.hosts[: met.rank].count(met.hosts[met.rank]) if met.hosts else 0
    if met.hosts and theirs is not None and theirs > ours:
        log.warning(
            "rank %d has local_rank() %d, but %s=%s: its container shares /dev/shm or the network with fewer ranks "
            "than the machine runs. Let containers of one machine share both, or choose GPUs by %s",
            met.rank,
            ours,
            found.launcher.local,
            env[found.launcher.local],
            found.launcher.local,
        )


def _load(found: OtherLaunch) -> Meet:
    """Import the function by which the processes of `found` meet: that of torchrun is in a layer above this one."""
    module, _, name = found.launcher.meet.partition(":")
    try:
        function: Meet = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ConfigError(
            found.variable,
            f"is {found.value}: {found}, but the module by which they meet cannot be imported ({error}). Install what "
            f"is missing, or start the ranks with: farandole run -np {found.size or 'N'} python train.py",
        ) from error
    return function
