"""Several hosts, as network namespaces: right results, no connection too many, and losses that all hear of."""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from namespaces import DEVICE, ip, problem

from farandole.config import Config
from farandole.core.context import Context
from farandole.core.operations.kinds import ALLREDUCE, BARRIER
from farandole.errors import PeerLost, RendezvousError
from farandole.meeting.rendezvous import from_environment
from farandole.topology import interface_address
from helpers.collectives import check_collectives
from helpers.hosts import SECOND_DEVICE, cut_off, run_on_hosts
from helpers.recurring import recurring

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.skipif(bool(problem()), reason=problem() or "namespaces"),
]

HEARTBEAT = timedelta(seconds=3)  # less would take a busy machine for a cable that is pulled
GENEROUS = 15.0  # seconds; this machine may be busy
ESTABLISHED = "01"
SUM = 1


def connections(address: str) -> int:
    """Count the open connections of this host's `address` but those to the rendezvous, whose own ends with 254."""
    lines = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    # Addresses are written as hexadecimal numbers in the byte order of this machine.
    here = bytes(int(part) for part in reversed(address.split("."))).hex().upper()
    return sum(
        state == ESTABLISHED and local.startswith(here) and int(remote[:2], 16) != 254
        for _, local, remote, state, *_ in lines
    )


def checks_and_counts(context: Context) -> tuple[int, list[int], list[int]]:
    check_collectives(context)
    count = connections(interface_address(DEVICE))
    context.engine.run(recurring(BARRIER), "all have counted", None, None)
    return count, context.topology.host_numbers, context.topology.control_parents


@pytest.mark.parametrize("placement", ["AB", "ABCD", "AABB", "AABBCC", "AAB", "AAAB", "ABA", "ABAB", "ABBAC"])
def test_collectives_over_no_more_connections_than_needed(placement: str) -> None:
    size, hosts = len(placement), sorted(set(placement))
    sizes = {host: placement.count(host) for host in hosts}
    for host, (count, host_of, parents) in zip(placement, run_on_hosts(placement, checks_and_counts), strict=True):
        assert "".join(hosts[number] for number in host_of) == placement
        data = sizes[host] * (len(hosts) - 1 if len(set(sizes.values())) == 1 else size - sizes[host])
        edges = [(placement[child], placement[parent]) for child, parent in enumerate(parents) if parent >= 0]
        assert count == data + sum((host in edge) and edge[0] != edge[1] for edge in edges)


def meets_at_torchs_store(outer: Context) -> float:
    """Meet the other hosts at a store of torch's on the first one, and return a sum over all."""
    from torch.distributed import TCPStore

    from farandole.torch.distributed.store import StoreRendezvous

    outer.shutdown()
    first = interface_address(DEVICE).rpartition(".")[0] + ".1"
    limit = timedelta(seconds=GENEROUS)
    store = TCPStore(first, 29511, outer.size, is_master=outer.rank == 0, timeout=limit, wait_for_workers=False)
    met = StoreRendezvous(store, outer.rank, outer.size, secret=None, timeout=limit)
    with Context(met, Config(start_timeout=limit)) as context:
        values = np.ones(1000, np.float32)
        context.engine.run(recurring(ALLREDUCE), "x", values, values)
        context.engine.run(recurring(BARRIER), "before the store is closed", None, None)
        return float(values.sum())


def test_hosts_connect_that_met_at_a_store_of_torchs() -> None:
    pytest.importorskip("torch")
    assert run_on_hosts("AAB", meets_at_torchs_store) == [3000.0] * 3


def counts_both(context: Context) -> tuple[int, int, str | None]:
    check_collectives(context)
    counts = connections(interface_address(DEVICE)), connections(interface_address(SECOND_DEVICE))
    context.engine.run(recurring(BARRIER), "all have counted", None, None)
    return *counts, os.environ.get("NCCL_SOCKET_IFNAME")


def test_hosts_with_two_interfaces_connect_by_the_one_that_is_named() -> None:
    config = Config.from_environment({"HOROVOD_GLOO_IFACE": SECOND_DEVICE})
    counts = (0, 3)  # two for data, one for control
    assert run_on_hosts("AAB", counts_both, config=config) == [(*counts, f"={SECOND_DEVICE}")] * 3


def works_until_a_loss(context: Context, victim: int, how: str) -> tuple[int, float, float]:
    """Return who was lost, when, and when it was cut off; the victim loses its cable, or its life, in the middle."""
    values, began = np.ones(100_000, np.float32), 0.0
    for step in range(10**9):
        if context.rank == victim and step == 50:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            began = time.monotonic()
            ip("link", "set", DEVICE, "down")
        try:
            context.engine.run(recurring(ALLREDUCE, op=SUM), f"x{step % 3}", values, values)
        except PeerLost as lost:
            return lost.rank, time.monotonic(), began
    raise AssertionError("nobody was lost")


@pytest.mark.parametrize(("placement", "victim"), [("AB", 1), ("AABBCC", 5), ("ABAB", 0)])
def test_a_cable_that_is_pulled_is_noticed_on_both_sides(placement: str, victim: int) -> None:
    config = Config(heartbeat=HEARTBEAT)
    results = run_on_hosts(placement, works_until_a_loss, victim, "cable", config=config)
    began = results[victim][2]
    for rank, (lost, noticed, _) in enumerate(results):
        cut_off = placement[rank] == placement[victim]
        assert (placement[lost] == placement[victim]) != cut_off, f"rank {rank} blames rank {lost}"
        assert noticed - began < HEARTBEAT.total_seconds() + GENEROUS


def works_through_an_interruption(context: Context, victim: int) -> float:
    values = np.ones(100_000, np.float32)
    for step in range(100):
        if context.rank == victim and step == 50:
            ip("link", "set", DEVICE, "down")
            time.sleep(HEARTBEAT.total_seconds() / 3)
            ip("link", "set", DEVICE, "up")
        context.engine.run(recurring(ALLREDUCE, op=SUM), f"x{step % 3}", np.ones_like(values), values)
    return float(values.sum())


def test_a_short_interruption_does_no_harm() -> None:
    results = run_on_hosts("AAB", works_through_an_interruption, 2, config=Config(heartbeat=HEARTBEAT))
    assert results == [3 * 100_000] * 3


def works_until_two_are_apart(context: Context) -> tuple[int, str, float, float]:
    """Return who was lost, why, when, and since when the second host does not see the third, but both the first."""
    values, began = np.ones(100_000, np.float32), 0.0
    try:
        for step in range(10**9):
            if context.rank == 1 and step == 50:
                cut_off(2)
                began = time.monotonic()
            context.engine.run(recurring(ALLREDUCE, op=SUM), f"x{step % 3}", values, values)
    except PeerLost as lost:
        return lost.rank, lost.reason, time.monotonic(), began
    raise AssertionError("nobody was lost")


def test_two_hosts_that_lose_sight_of_each_other_are_named() -> None:
    results = run_on_hosts("ABC", works_until_two_are_apart, config=Config(heartbeat=HEARTBEAT))
    began = results[1][3]
    for lost, why, noticed, _ in results:
        assert lost in (1, 2)
        assert why.startswith("no answer to data sent to it for 3 s: packets between its host and another one are lost")
        assert noticed - began < HEARTBEAT.total_seconds() + GENEROUS


def starts_with_two_apart(outer: Context) -> tuple[str, str]:
    outer.shutdown()
    if outer.rank == 1:
        cut_off(2)  # before it meets the others
    try:
        with Context(from_environment(), Config(start_timeout=timedelta(seconds=2))) as context:
            context.engine.run(recurring(BARRIER), "to no avail", None, None)
    except (PeerLost, RendezvousError) as error:
        return interface_address(DEVICE), str(error)
    raise AssertionError("they have met")


def test_hosts_that_cannot_reach_each_other_at_the_start_are_named_with_their_addresses() -> None:
    (_, first), (address_1, second), (address_2, third) = run_on_hosts("ABC", starts_with_two_apart)
    assert "rank 1" in first or "rank 2" in first
    for text in (second, third):
        assert address_1 in text and address_2 in text
    assert "missing: rank 2" in second and "missing: rank 1" in third


@pytest.mark.parametrize(("placement", "victim"), [("ABC", 0), ("AABBCC", 4), ("ABCBC", 2)])
def test_a_rank_that_is_killed_is_named_on_all_hosts(placement: str, victim: int) -> None:
    results = run_on_hosts(placement, works_until_a_loss, victim, "kill", dies=[victim])
    for rank, result in enumerate(results):
        if rank != victim:
            assert result[0] == victim
