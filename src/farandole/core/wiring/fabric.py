"""Choice of the transport for a job's tensors: the offer of each rank, and the decision of all from the offers."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from farandole.bootstrap.hosted import HostedRendezvous
from farandole.bootstrap.interconnects import find_interconnects
from farandole.bootstrap.mpi import MpiProcess
from farandole.config import Config
from farandole.core.wiring.mpi import join_mpi
from farandole.errors import ConfigError, spell_ranks
from farandole.handshake import Deadline
from farandole.other_launchers import find_other_launch
from farandole.rendezvous import Rendezvous

__all__ = ["NO_MPI", "Offer", "decide", "log_choice", "offer"]

log = logging.getLogger(__name__)

NO_MPI = -1


@dataclass(frozen=True, slots=True)
class Offer:
    """One rank's setting `fabric` and its MPI, as the others get them."""

    fabric: str
    place: int  # in MPI_COMM_WORLD, or NO_MPI: tensors cannot go over MPI, or are not worth it
    interconnect: str  # of its host, if MPI is offered because of it; else why it is not, "" where there is none


def offer(met: Rendezvous, size: int, config: Config, deadline: Deadline) -> tuple[Offer, MpiProcess | None]:
    """Return what this rank offers to the `size` ranks, of those that `met`, and its place in MPI if it offers that.

    With "mpi" MPI is started unless it runs. With "auto" it is offered where the ranks have met by MPI, which runs
    then, and this host has an interconnect. A job of one rank moves no tensors. Blocks up to `deadline`; raises
    `ConfigError` when "mpi" is set and there is no MPI library."""
    nothing = Offer(config.fabric, NO_MPI, "")
    launch = find_other_launch()
    by_mpi = isinstance(met, HostedRendezvous) and launch is not None and launch.way == "mpi"
    if size == 1 or config.fabric == "tcp" or (config.fabric == "auto" and not by_mpi):
        return nothing, None
    if config.fabric == "mpi":
        process = join_mpi(config, deadline)
        return Offer("mpi", process.rank, ""), process
    ports = find_interconnects()
    usable = [each.name for each in ports if not each.obstacle]
    if not usable:
        return Offer("auto", NO_MPI, "; ".join(map(str, ports))), None
    process = join_mpi(config, deadline)
    if not process.allows_threads():
        return Offer("auto", NO_MPI, "the program has started MPI without MPI_THREAD_MULTIPLE"), None
    return Offer("auto", process.rank, usable[0]), process


def decide(offers: Sequence[Offer], hosts: Sequence[str]) -> bool:
    """Return whether tensors of the ranks go over MPI; every rank decides the same.

    MPI is taken if all ranks set "mpi", or if all set "auto" and offer it, on several hosts. Raises `ConfigError` when
    only some set "mpi"."""
    asked = [rank for rank, each in enumerate(offers) if each.fabric == "mpi"]
    if asked:
        without = [rank for rank in range(len(offers)) if rank not in asked]
        if without:
            raise ConfigError("fabric", f"is mpi, but not on {spell_ranks(without)}; set it alike on all ranks")
        return len(offers) > 1
    return all(each.place != NO_MPI for each in offers) and len(set(hosts)) > 1


def log_choice(offers: Sequence[Offer], hosts: Sequence[str], process: MpiProcess | None) -> None:
    """Log in one sentence what "auto" has chosen, where there was a choice: on several hosts with an interconnect.

    It is a warning, because MPI was not asked for, and without the interconnect the job may be slow."""
    offered = [each for each in offers if each.fabric == "auto" and each.place != NO_MPI]
    if not offered or len(set(hosts)) == 1:
        return
    if decide(offers, hosts) and process is not None:
        log.warning(
            "tensors go over MPI, %s (%s), because every host has an interconnect, rank 0's %s; FARANDOLE_FABRIC=mpi "
            "asks for it, FARANDOLE_FABRIC=tcp for TCP",
            process.path,
            process.abi,
            offers[0].interconnect,
        )
        return
    without = [rank for rank, each in enumerate(offers) if each.place == NO_MPI]
    first = offers[without[0]]
    reason = first.interconnect or ("fabric is tcp there" if first.fabric == "tcp" else "no interconnect there")
    log.warning(
        "tensors go over TCP, although hosts have an interconnect (%s): not %s (%s); FARANDOLE_FABRIC=tcp asks for it",
        offered[0].interconnect,
        spell_ranks(without),
        reason,
    )
