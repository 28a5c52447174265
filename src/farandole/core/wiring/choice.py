"""Choice of the transport for a job's tensors: each rank makes an offer, and all decide from the offers."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from farandole.config import Config
from farandole.core.wiring.fabric import Fabric
from farandole.core.wiring.mpi import MpiFabric
from farandole.errors import ConfigError, spell_ranks
from farandole.meeting.frames import Deadline
from farandole.meeting.rendezvous import Rendezvous

log = logging.getLogger(__name__)

OWN = ""  # in place of a fabric's name: farandole's own sockets and shared memory
_FABRICS: Mapping[str, type[Fabric]] = {each.name: each for each in (MpiFabric,)}  # the first that all ranks offer


@dataclass(frozen=True, slots=True)
class Offer:
    """One rank's setting `fabric` and the fabric that it can use, which it sends to the other ranks."""

    setting: str
    fabric: str = OWN  # the name of the fabric that the rank offers
    address: str = ""  # of the rank within the fabric
    reason: str = ""  # the device because of which a fabric is offered; or the obstacle; "" without a device


def is_fabric(setting: str) -> bool:
    """Return whether this value of the setting `fabric` asks for a fabric, rather than for our own transport."""
    return setting in _FABRICS


def offer(rendezvous: Rendezvous, config: Config, deadline: Deadline) -> tuple[Offer, Fabric | None]:
    """Return this rank's offer to the ranks of `rendezvous`, and the fabric if it offers one.

    A fabric that is asked for is offered in any case. With "auto" it is offered if `Fabric.found` finds it useful. A
    single rank needs no transport. Blocks up to `deadline`; raises `ConfigError` if a fabric is asked for and there is
    none."""
    if rendezvous.size == 1 or config.fabric == "tcp":
        return Offer(config.fabric), None
    if is_fabric(config.fabric):
        fabric = _FABRICS[config.fabric].requested(config, deadline)
        return Offer(config.fabric, fabric.name, fabric.address), fabric
    obstacle = ""
    for kind in _FABRICS.values():
        found = kind.found(rendezvous, config, deadline)
        if not isinstance(found, str):
            return Offer(config.fabric, found.name, found.address, found.reason), found
        obstacle = obstacle or found
    return Offer(config.fabric, reason=obstacle), None


def decide(offers: Sequence[Offer], hosts: Sequence[str]) -> str:
    """Return the name of the fabric that carries tensors, or `OWN`; all ranks reach the same decision.

    It is the fabric that all ranks ask for, or the one that all ranks offer, if they are on several hosts. Raises
    `ConfigError` if only some ranks ask for a fabric."""
    asked = [each.setting for each in offers if is_fabric(each.setting)]
    if asked:
        without = [rank for rank, each in enumerate(offers) if each.setting != asked[0]]
        if without:
            raise ConfigError("fabric", f"is {asked[0]}, but not on {spell_ranks(without)}; set it alike on all ranks")
        return asked[0] if len(offers) > 1 else OWN
    return offers[0].fabric if len({each.fabric for each in offers}) == 1 and len(set(hosts)) > 1 else OWN


def log_choice(offers: Sequence[Offer], hosts: Sequence[str], fabric: Fabric | None) -> None:
    """Log the choice of "auto", if there was one: on several hosts, with a device for it on at least one.

    It is a warning, because the user has not asked for the fabric, and the job may be slow without the device."""
    offered = [each for each in offers if each.setting == "auto" and each.fabric != OWN]
    if not offered or len(set(hosts)) == 1:
        return
    if fabric is not None and decide(offers, hosts) != OWN:
        log.warning(
            "tensors go over %s, because every host has an interconnect, rank 0's %s; FARANDOLE_FABRIC=%s asks for it, "
            "FARANDOLE_FABRIC=tcp for TCP",
            fabric,
            offers[0].reason,
            fabric.name,
        )
        return
    without = [rank for rank, each in enumerate(offers) if each.fabric != offered[0].fabric]
    first = offers[without[0]]
    reason = first.reason or ("fabric is tcp there" if first.setting == "tcp" else "no interconnect there")
    log.warning(
        "tensors go over TCP, although hosts have an interconnect (%s): not %s (%s); FARANDOLE_FABRIC=tcp asks for it",
        offered[0].reason,
        spell_ranks(without),
        reason,
    )
