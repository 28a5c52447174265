"""Ranks on several hosts of this machine, each of which is a network namespace."""

from collections.abc import Callable, Collection

from namespaces import DEVICE, bridge, inside, ip, namespaces

from farandole.config import Config
from farandole.topology import interface_address
from helpers.outcomes import RanksFailed
from helpers.processes import run_processes

__all__ = ["SECOND_DEVICE", "cut_off", "run_on_hosts"]

SECOND_DEVICE = "fd-second"


def run_on_hosts(
    placement: str,
    body: Callable[..., object],
    *args: object,
    config: Config | None = None,
    dies: Collection[int] = (),
    timeout: float = 60.0,
) -> list[object]:
    """Run `body(context, *args)` on hosts; return results in rank order.

    `placement` has a letter per rank, that of its host: "AAB" is two ranks on the first host and one on the second. All
    meet, and by default connect, by DEVICE; each host has a SECOND_DEVICE too, that leads to the others. Raises
    `RanksFailed` as `run_ranks` does."""
    hosts = sorted(set(placement))
    with namespaces(len(hosts)) as names, bridge(names, DEVICE) as address, bridge(names, SECOND_DEVICE):
        outcomes = run_processes(
            len(placement),
            body,
            args,
            timeout=timeout,
            config=config or Config(),
            dies=dies,
            address=address,
            prefixes=[inside(names[hosts.index(host)]) for host in placement],
        )
    failures = [each for each in outcomes if each.failed]
    if failures:
        raise RanksFailed(len(placement), failures)
    return [each.value for each in sorted(outcomes, key=lambda each: each.rank)]


def cut_off(place: int) -> None:
    """Let nothing that the caller's host sends reach the `place`-th host any more; neither host is told."""
    net = interface_address(DEVICE).rpartition(".")[0]
    # There is nobody with this hardware address.
    ip("neighbor", "replace", f"{net}.{place + 1}", "lladdr", "02:00:00:00:00:fe", "nud", "permanent", "dev", DEVICE)
