"""Places of ranks, and the variables that carry them."""

import math
import os
import re
import socket
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole._native import data_peers, make_grid
from farandole.errors import ConfigError
from farandole.topology import (
    CONTROL_DEGREE,
    JobEnvironment,
    Topology,
    host_identity,
    interface_address,
    interface_addresses,
    interface_of,
)

host_lists = st.lists(st.sampled_from(["a", "b", "c", "d"]), min_size=1, max_size=24)


def test_two_hosts_with_two_ranks_each() -> None:
    hosts = ["a", "a", "b", "b"]
    places = [Topology.from_hosts(rank, hosts) for rank in range(4)]
    assert [each.local_rank for each in places] == [0, 1, 0, 1]
    assert [each.cross_rank for each in places] == [0, 0, 1, 1]
    assert {(each.local_size, each.cross_size) for each in places} == {(2, 2)}
    assert places[3].local_ranks == (2, 3)
    assert places[0].is_homogeneous


def test_unequal_hosts() -> None:
    places = [Topology.from_hosts(rank, ["a", "a", "b"]) for rank in range(3)]
    assert [each.cross_size for each in places] == [2, 1, 2]
    assert not places[0].is_homogeneous


def test_control_connections_of_three_hosts() -> None:
    assert Topology.from_hosts(0, ["a", "b", "a", "b", "c"]).control_parents == [-1, 0, 0, 1, 0]


@given(st.lists(st.integers(0, 99), min_size=1, max_size=300))
def test_control_connections_are_a_shallow_tree(places: list[int]) -> None:
    hosts = [f"host {place}" for place in places]
    parents = Topology.from_hosts(0, hosts).control_parents
    assert parents[0] == -1
    levels = 2 + math.ceil(math.log(1 + len(set(hosts)), CONTROL_DEGREE))
    for rank in range(len(hosts)):
        way = [rank]
        while way[-1] != 0 and len(way) <= levels:
            way.append(parents[way[-1]])
        assert way[-1] == 0, f"rank {rank} does not reach rank 0: {way}"
    for rank, host in enumerate(hosts):
        below = [each for each, parent in enumerate(parents) if parent == rank]
        remote = [each for each in below if hosts[each] != host]
        assert len(remote) <= CONTROL_DEGREE and len(below) < hosts.count(host) + CONTROL_DEGREE
        # Between hosts only their first ranks talk; within a host all talk to its first.
        assert not below or rank == hosts.index(host)
        assert all(each == hosts.index(hosts[each]) for each in remote)


def test_the_places_of_many_ranks_share_their_list_of_hosts() -> None:
    """The work of a launcher is in proportion to its ranks."""
    places = Topology.all_from_hosts(["a", "b"] * 2048)
    assert len(places) == 4096 and {id(each.hosts) for each in places} == {id(places[0].hosts)}
    assert places[4095] == Topology.from_hosts(4095, places[0].hosts)
    assert Topology.all_from_hosts([]) == []


@given(host_lists)
def test_places_fit_together(hosts: list[str]) -> None:
    places = [Topology.from_hosts(rank, hosts) for rank in range(len(hosts))]
    counts = Counter(hosts)
    for place in places:
        assert place.size == len(hosts)
        assert place.local_size == counts[hosts[place.rank]] == len(place.local_ranks)
        assert place.local_ranks[place.local_rank] == place.rank
        peers = [each for each in places if each.local_rank == place.local_rank]
        assert place.cross_size == len(peers)
        assert peers[place.cross_rank] is place
        assert place.is_homogeneous == (len(set(counts.values())) == 1)


@given(host_lists, st.permutations(["a", "b", "c", "d"]))
def test_names_of_hosts_do_not_matter(hosts: list[str], names: list[str]) -> None:
    renamed = [names["abcd".index(host)] for host in hosts]
    for rank in range(len(hosts)):
        one, other = Topology.from_hosts(rank, hosts), Topology.from_hosts(rank, renamed)
        assert (one.local_rank, one.cross_rank, one.local_ranks) == (
            other.local_rank,
            other.cross_rank,
            other.local_ranks,
        )


@given(host_lists)
def test_data_goes_along_columns_or_to_everybody(hosts: list[str]) -> None:
    places = [Topology.from_hosts(rank, hosts) for rank in range(len(hosts))]
    numbers = places[0].host_numbers
    peers = [data_peers(rank, numbers) for rank in range(len(hosts))]
    grid = places[0].is_homogeneous and 1 < places[0].local_size < len(hosts)
    assert make_grid(numbers) == grid
    for place in places:
        mine = peers[place.rank]
        assert all(place.rank in peers[other] for other in mine)
        others = {each.rank for each in places if hosts[each.rank] != hosts[place.rank]}
        same_place = {rank for rank in others if places[rank].local_rank == place.local_rank}
        assert mine == sorted(same_place if grid else others)
        if grid:
            assert len(mine) == place.cross_size - 1


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_cannot_be(rank: int) -> None:
    with pytest.raises(ConfigError, match=rf"rank: must be in 0\.\.1, got {rank}"):
        Topology.from_hosts(rank, ["a", "a"])


def test_a_host_without_a_folder_for_shared_memory_has_an_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    there = os.stat

    def stat(path: object, *more: object, **named: object) -> object:
        if path == "/dev/shm":
            raise FileNotFoundError(path)
        return there(path, *more, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "stat", stat)
    assert host_identity() == host_identity()


def test_host_identity_is_stable_and_names_the_host() -> None:
    assert host_identity() == host_identity()
    assert re.fullmatch(re.escape(socket.gethostname()) + "#[0-9a-f]{12}", host_identity())


@pytest.mark.parametrize("address", ["127.0.0.1", "10.1.2.3", "::1"])
def test_an_address_is_its_own_interface(address: str) -> None:
    assert interface_address(address) == address


def test_the_address_of_an_interface() -> None:
    assert interface_address("lo") == "127.0.0.1"


def test_of_several_interfaces_the_host_has_some() -> None:
    assert interface_address("ib7,lo") == "127.0.0.1"
    assert interface_addresses("ib7, lo,192.0.2.1,127.0.0.1,127.0.0.2") == ["127.0.0.1", "127.0.0.2"]


@pytest.mark.parametrize(
    ("listed", "sentence"),
    [
        ("ib7,192.0.2.1", "interface: 'ib7' is neither .*; 192.0.2.1 is no address of this host"),
        ("lo,", "'lo,' has an empty name"),
        ("", "'' has an empty name"),
    ],
)
def test_lists_of_interfaces_that_do_not_help(listed: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        interface_addresses(listed)


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None
    assert interface_of("2001:db8::1") is None


def test_an_interface_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"interface: 'ib7' is neither an address nor one of .*lo"):
        interface_address("ib7")


JOB = JobEnvironment(rank=1, size=4, rendezvous="10.0.0.1:4000", secret=bytes(range(32)), generation=2, job="x7")


def test_a_job_written_is_the_job_read() -> None:
    assert JobEnvironment.read(JOB.write()) == JOB


@given(
    size=st.integers(1, 2000),
    rank=st.integers(0, 1999),
    generation=st.integers(0, 9),
    places=st.lists(st.none() | st.integers(0, 99), min_size=4, max_size=4),
)
def test_any_job_survives_the_environment(size: int, rank: int, generation: int, places: list[int | None]) -> None:
    job = JobEnvironment(
        rank=rank % size,
        size=size,
        rendezvous="h:1",
        secret=b"s" * 32,
        generation=generation,
        local_rank=places[0],
        local_size=places[1],
        cross_rank=places[2],
        cross_size=places[3],
    )
    assert JobEnvironment.read(job.write()) == job


def test_horovods_names_are_written_for_user_scripts() -> None:
    variables = JOB.write()
    assert variables["HOROVOD_RANK"] == variables["FARANDOLE_RANK"] == "1"
    assert variables["HOROVOD_SIZE"] == "4"
    assert "HOROVOD_LOCAL_RANK" not in variables  # nobody knows it yet
    assert "HOROVOD_HOSTNAME" not in variables
    named = replace(JOB, host="h1")
    assert named.write()["HOROVOD_HOSTNAME"] == "h1" and JobEnvironment.read(named.write()) == named
    assert not any("SECRET" in name for name in variables if name.startswith("HOROVOD"))
    assert "RANK" not in variables


def test_torchs_names_are_written_where_rank_0_can_listen() -> None:
    job = replace(JOB, local_rank=0, local_size=2, torch_store="[fd00::1]:4001")
    variables = job.write(torch_env=True)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert [variables[name] for name in names] == ["1", "4", "0", "2", "fd00::1", "4001"]
    assert JobEnvironment.read(variables) == job
    assert not {*names} & job.write().keys()


def test_torch_finds_a_job_whose_launcher_leaves_its_variables_out() -> None:
    job = replace(JOB, torch_store="10.0.0.1:4001")
    assert JobEnvironment.without_torch(job.write()) == job
    assert JobEnvironment.without_torch(job.write(torch_env=True)) is None
    assert JobEnvironment.without_torch(JOB.write()) is None  # no store
    assert JobEnvironment.without_torch({}) is None


def test_the_secret_is_not_shown() -> None:
    assert JOB.secret.hex() not in repr(JOB)
    assert repr(JOB.secret) not in repr(JOB)


def test_without_a_launcher_there_is_no_job() -> None:
    assert JobEnvironment.read({"HOROVOD_RANK": "1", "PATH": "/bin"}) is None


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"FARANDOLE_SECRET": ""}, "FARANDOLE_SECRET: is not set, though FARANDOLE_RANK is"),
        ({"FARANDOLE_RANK": ""}, "FARANDOLE_RANK: is not set, though FARANDOLE_SIZE is"),
        ({"FARANDOLE_RANK": "one"}, "FARANDOLE_RANK: must be a whole number >= 0, got 'one'"),
        ({"FARANDOLE_RANK": "-1"}, "FARANDOLE_RANK: must be a whole number >= 0, got '-1'"),
        ({"FARANDOLE_RANK": "4"}, "FARANDOLE_RANK: rank 4 of 4 ranks cannot be"),
        ({"FARANDOLE_SIZE": "0"}, "FARANDOLE_RANK: rank 1 of 0 ranks cannot be"),
        ({"FARANDOLE_GENERATION": "x"}, "FARANDOLE_GENERATION: must be a whole number >= 0, got 'x'"),
        ({"FARANDOLE_LOCAL_RANK": "²"}, "FARANDOLE_LOCAL_RANK: must be a whole number >= 0"),
    ],
)
def test_variables_that_cannot_be(change: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        JobEnvironment.read(JOB.write() | change)


def test_a_bad_secret_is_not_repeated() -> None:
    with pytest.raises(ConfigError) as caught:
        JobEnvironment.read(JOB.write() | {"FARANDOLE_SECRET": "sesame"})
    assert "sesame" not in str(caught.value)
    assert "hexadecimal" in str(caught.value)
