"""Choice of the transport for a job's tensors: each rank makes an offer, and all decide from the offers."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from farandole.config import Config
from farandole.core.wiring.mpi import join_mpi
from farandole.errors import ConfigError, spell_ranks
from farandole.meeting.handshake import Deadline
from farandole.meeting.launched.hosted import HostedRendezvous
from farandole.meeting.launched.interconnects import find_interconnects
from farandole.meeting.launched.mpi import MpiProcess
from farandole.meeting.rendezvous import Rendezvous
from farandole.other_launchers import find_other_launch

__all__ = ["NO_MPI", "Offer", "decide", "log_choice", "offer"]

log = logging.getLogger(__name__)

NO_MPI = -1


@dataclass(frozen=True, slots=True)
class Offer:
    """One rank's setting `fabric` and its place in MPI, which it sends to the other ranks."""

    fabric: str
    place: int  # in MPI_COMM_WORLD; NO_MPI if the rank does not offer MPI
    interconnect: str  # the host's, because of which MPI is offered; or the obstacle; "" without an interconnect


def offer(met: Rendezvous, size: int, config: Config, deadline: Deadline) -> tuple[Offer, MpiProcess | None]:
    """Return this rank's offer, and its MPI process if it offers MPI.

    `size` is the number of ranks of the job or process set, and `met` is the job's rendezvous. With "mpi" MPI is
    started unless it runs. With "auto" MPI is offered if the ranks have met over MPI, which then runs, and this host
    has an interconnect. A single rank needs no transport. Blocks up to `deadline`; raises `ConfigError` if "mpi" is set
    and there is no MPI library."""
    nothing = Offer(config.fabric, NO_MPI, "")
    launch = find_other_launch()
    by_mpi = isinstance(met, HostedRendezvous) and launch is not None and launch.by_mpi
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
    """Return whether tensors go over MPI; all ranks reach the same decision.

    They do if all ranks set "mpi", or if all ranks offer MPI with "auto" and are on several hosts. Raises `ConfigError`
    if only some ranks set "mpi"."""
    asked = [rank for rank, each in enumerate(offers) if each.fabric == "mpi"]
    if asked:
        without = [rank for rank in range(len(offers)) if rank not in asked]
        if without:
            raise ConfigError("fabric", f"is mpi, but not on {spell_ranks(without)}; set it alike on all ranks")
        return len(offers) > 1
    return all(each.place != NO_MPI for each in offers) and len(set(hosts)) > 1


def log_choice(offers: Sequence[Offer], hosts: Sequence[str], process: MpiProcess | None) -> None:
    """Log the choice of "auto", if there was one: on several hosts, with an interconnect on at least one.

    It is a warning, because the user has not asked for MPI, and the job may be slow without the interconnect."""
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
