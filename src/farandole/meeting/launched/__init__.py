"""Choice of the rendezvous by the launcher of this process: farandole's own, mpirun, srun, torchrun, or Kubernetes for
the pods of an Indexed Job."""

import importlib
import os
from collections.abc import Mapping
from typing import cast

from farandole.config import Config
from farandole.errors import ConfigError
from farandole.meeting.handshake import Deadline
from farandole.meeting.launched.communicators import Communicator, warn_of_lone_processes
from farandole.meeting.launched.hosted import Exchange, meet
from farandole.meeting.launched.indexed_job import is_indexed_job, meet_in_indexed_job, warn_of_lone_pods
from farandole.meeting.launched.mpi import MpiExchange
from farandole.meeting.launched.operator import require_hosts, require_listed_host
from farandole.meeting.launched.slurm import FolderExchange
from farandole.meeting.rendezvous import Rendezvous, from_environment
from farandole.other_launchers import OtherLaunch, find_other_launch
from farandole.topology import JobEnvironment

__all__ = ["find_rendezvous"]


def find_rendezvous(
    config: Config, env: Mapping[str, str] | None = None, communicator: Communicator | None = None
) -> Rendezvous:
    """Make the rendezvous for the variables that a launcher has set in `env` (default: `os.environ`).

    Without a launcher this process is the only rank. Processes of mpirun, srun or torchrun get rank 0's address and a
    new secret through an exchange of the launcher (MPI, a shared folder, torch's store), and then meet at rank 0.
    That blocks until all have arrived, up to `config.start_timeout`. Pods of an Indexed Job meet at rank 0's host
    name, in the first all-gather. With a `communicator` of MPI its processes meet, in its order. Raises `ConfigError`
    if the exchange is not available or connects fewer processes than the launcher has started, and `RendezvousError`
    for ranks that do not find rank 0."""
    env = os.environ if env is None else env
    job = JobEnvironment.read(env)
    if job is not None:
        if job.rank == 0:
            warn_of_lone_processes(job.size)
        return from_environment(env)
    require_listed_host(env)
    found = find_other_launch(env)
    if communicator is not None and (communicator.Get_size() > 1 or (found is not None and found.way == "mpi")):
        deadline = Deadline(config.start_timeout)
        return meet(MpiExchange(found, config.mpi_library, deadline, communicator), config, deadline)
    if found is None and is_indexed_job(env):
        return meet_in_indexed_job(env, config)
    if found is None:
        warn_of_lone_pods(env)
    if found is None or not found.way:
        return from_environment(env)
    deadline = Deadline(config.start_timeout)
    rendezvous = meet(_exchange(found, config, env, deadline), config, deadline)
    try:
        if found.way == "mpi":
            require_hosts(env, rendezvous.size, rendezvous.hosts)
    except BaseException:
        rendezvous.close()
        raise
    return rendezvous


def _exchange(found: OtherLaunch, config: Config, env: Mapping[str, str], deadline: Deadline) -> Exchange:
    if found.way == "mpi":
        return MpiExchange(found, config.mpi_library, deadline)
    assert found.size is not None
    if found.way == "slurm":
        return FolderExchange(env, found.size, config.rendezvous_folder)
    try:
        # By name, because layers below torch do not depend on it.
        torch = importlib.import_module("farandole.torch.distributed.exchange")
    except ImportError as error:
        raise ConfigError(
            found.variable,
            f"is {found.value}: {found}, whose ranks meet at torch's store, but torch cannot be imported ({error}). "
            f"Install it, or start the ranks with: farandole run -np {found.size} python train.py",
        ) from error
    return cast(Exchange, torch.StoreExchange(int(env["RANK"]), found.size, deadline))
