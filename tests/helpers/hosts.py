"""Ranks on several simulated hosts, which are network namespaces of this machine."""

from collections.abc import Callable, Collection

from namespaces import DEVICE, bridge, inside, ip, namespaces

from farandole.config import Config
from farandole.topology import interface_address
from helpers.outcomes import RanksFailed
from helpers.processes import run_processes

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

    `placement` has the letter of a host for each rank: "AAB" is two ranks on the first host and one on the second. The
    rendezvous, and by default all connections, use DEVICE; each host also has a SECOND_DEVICE connected to the others.
    Raises `RanksFailed` as `run_ranks` does."""
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
    """Silently drop all that the caller's host sends to the `place`-th host from now on."""
    net = interface_address(DEVICE).rpartition(".")[0]
    # No host has this hardware address.
    ip("neighbor", "replace", f"{net}.{place + 1}", "lladdr", "02:00:00:00:00:fe", "nud", "permanent", "dev", DEVICE)
