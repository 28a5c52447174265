"""Host lists and host files."""

import socket
from datetime import timedelta
from pathlib import Path

import pytest

from farandole.errors import ConfigError, SlotsError
from farandole.launch.backend import Host
from farandole.launch.backends import choose_backend, find_site
from farandole.launch.backends.local import LocalBackend
from farandole.launch.backends.slurm import Allocation, Srun
from farandole.launch.backends.ssh import Ssh, SshBackend
from farandole.launch.hosts import fill_slots, is_local, parse_hosts, read_hostfile


def test_parse_hosts() -> None:
    assert parse_hosts("a:2, b:4,c") == (Host("a", 2), Host("b", 4), Host("c", 1))


def test_hosts_are_a_text() -> None:
    with pytest.raises(ConfigError, match=r"hosts: must be a text such as 'host1:2,host2:2', got \['a:2'\]"):
        choose_backend(["a:2"], None, 2, Ssh())  # type: ignore[arg-type]


def test_addresses_of_ipv6_stand_in_brackets(tmp_path: Path) -> None:
    assert parse_hosts("[fd00::1]:2,me@[fd00::2],[::1]") == (Host("fd00::1", 2), Host("me@fd00::2", 1), Host("::1", 1))
    file = tmp_path / "hosts"
    file.write_text("fd00::1 slots=2\n[fd00::2] slots=3\n[fd00::3]:4\n")
    assert read_hostfile(file) == (Host("fd00::1", 2), Host("fd00::2", 3), Host("fd00::3", 4))
    with pytest.raises(
        ConfigError, match=r"'fd00::1:2' is ambiguous; write the IPv6 address in brackets: \[fd00::1\]:2"
    ):
        parse_hosts("a:1,fd00::1:2")


@pytest.mark.parametrize("text", ["", "a:", "a:0", "a:x", ":2", "a,,b"])
def test_what_is_no_host_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="is no host"):
        parse_hosts(text)


@pytest.mark.parametrize(
    "name", ["-oProxyCommand=x", "me@-oNo=x", "-l:2", "a b", "a;b", "$(x)", "a`x`", "a@b@c", "slots=2"]
)
def test_names_that_ssh_or_a_shell_would_take_for_more(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="begins with no dash, and has no spaces or characters of a shell"):
        parse_hosts(f"a:1,{name}")
    if " " not in name:
        (tmp_path / "hosts").write_text(f"{name} slots=2\n")
        with pytest.raises(ConfigError, match="is no host: a name begins"):
            read_hostfile(tmp_path / "hosts")
    with pytest.raises(ConfigError, match="is no host: a name begins"):
        parse_hosts("#:1")  # a comment of a discovery script
    assert [host.name for host in parse_hosts("me@gpu_1.x-y:2,[fe80::1%eth0]:1")] == ["me@gpu_1.x-y", "fe80::1%eth0"]


def test_hostfile(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# mine\na slots=2\n\nb:3  # b\nc max_slots=9\n")
    assert read_hostfile(file) == (Host("a", 2), Host("b", 3), Host("c", 1))


def test_spaces_around_the_equals_sign_and_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("a slots = 2 max-slots= 4\r\nb slots =3\r\n", encoding="utf-8-sig")
    assert read_hostfile(file) == (Host("a", 2), Host("b", 3))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("a slot=4", "unknown word 'slot=4'"),
        ("a SLOTS=4", "unknown word 'SLOTS=4'"),
        ("a 4", "unknown word '4'"),
        ("a b c", "unknown word 'b'"),
        ("a slots=2 user=me", "unknown word 'user=me'"),
        ("a slots=", "is no host"),
        ("a:2 slots=4", "names the slots twice"),
        ("a slots=2 slots=4", "names the slots twice"),
    ],
)
def test_no_word_of_a_hostfile_is_skipped(line: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(f"{line}\n")
    with pytest.raises(ConfigError, match=problem):
        read_hostfile(file)


@pytest.mark.parametrize("slots", ["1048577", "99999999999999", "9" * 5000])
def test_numbers_that_would_fill_the_memory(slots: str) -> None:
    with pytest.raises(ConfigError, match="has more than 1048576 slots"):
        parse_hosts(f"a:{slots}")
    with pytest.raises(ConfigError, match="num_proc: must be at most 1048576"):
        fill_slots([Host("localhost", 10**12)], 10**12)


def test_hostfile_without_hosts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*No such file"):
        read_hostfile(tmp_path / "none")
    (tmp_path / "empty").write_text("# nothing\n")
    with pytest.raises(ConfigError, match="names no host"):
        read_hostfile(tmp_path / "empty")
    (tmp_path / "binary").write_bytes(b"\x9f\x00")
    with pytest.raises(ConfigError, match="no text in UTF-8"):
        read_hostfile(tmp_path / "binary")


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", socket.gethostname()])
def test_this_machine(name: str) -> None:
    assert is_local(name)


# 192.0.2.0/24 is nobody's (RFC 5737), and so is .invalid (RFC 6761).
@pytest.mark.parametrize("name", ["192.0.2.1", "there.invalid"])
def test_other_machines_are_reached_by_ssh(name: str) -> None:
    assert isinstance(choose_backend(f"localhost:1,{name}:1", None, 2, Ssh()), SshBackend)
    assert isinstance(choose_backend(f"localhost:1,{name}:1", None, 1, Ssh()), LocalBackend)


def test_the_command_of_ssh() -> None:
    words = Ssh(command="ssh -F 'my config'", port=2222, identity_file="key").words("node1", "true")
    assert words[:3] == ["ssh", "-F", "my config"] and words[-3:] == ["--", "node1", "true"]
    assert words[-7:-3] == ["-p", "2222", "-i", "key"] and "BatchMode=yes" in words


def test_slots(tmp_path: Path) -> None:
    assert choose_backend(None, None, 5, Ssh()).hosts == (Host("localhost", 5),)
    assert choose_backend("localhost:2,127.0.0.1:2", None, 4, Ssh()).hosts == (Host("localhost", 4),)
    with pytest.raises(SlotsError, match=r"5 ranks need 5 slots, but localhost:2, localhost:2 has 4"):
        choose_backend("localhost:2,localhost:2", None, 5, Ssh())
    file = tmp_path / "hosts"
    file.write_text("localhost slots=1\n")
    with pytest.raises(SlotsError):
        choose_backend(None, file, 2, Ssh())
    with pytest.raises(ConfigError, match="not both"):
        choose_backend("localhost:2", file, 2, Ssh())


def test_ranks_fill_one_hosts_slots_after_another() -> None:
    a, b = Host("a", 2), Host("b", 3)
    assert fill_slots((a, b), 4) == [a, a, b, b]
    with pytest.raises(SlotsError, match="6 ranks need 6 slots, but a:2, b:3 has 5"):
        fill_slots((a, b), 6)


ALLOCATION = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a[1-3]", "SLURM_TASKS_PER_NODE": "2(x2),1"}


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """An allocation whose commands stand in a folder of their own."""
    for name, line in (("scontrol", "echo a1 a2 a3"), ("srun", "exit 1")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    return {**ALLOCATION, "PATH": f"{tmp_path}:/bin:/usr/bin"}


def allocated_hosts(env: dict[str, str]) -> tuple[Host, ...]:
    site = find_site(env)
    assert site is None or isinstance(site, Allocation)
    return () if site is None else site.hosts()


def test_nodes_of_an_allocation(slurm: dict[str, str]) -> None:
    assert allocated_hosts(slurm) == (Host("a1", 2), Host("a2", 2), Host("a3", 1))


@pytest.mark.parametrize(
    "other",
    [
        {"FARANDOLE_RANK": "0"},
        {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"},
        {"SLURM_JOB_NODELIST": ""},
        {"SLURM_TASKS_PER_NODE": ""},
    ],
)
def test_ranks_and_tasks_of_an_allocation_use_their_own_machine(slurm: dict[str, str], other: dict[str, str]) -> None:
    assert allocated_hosts(slurm | other) == ()


def test_an_allocation_that_slurm_does_not_explain(slurm: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is a\[1-3\]: 3 nodes, but SLURM_TASKS_PER_NODE is 1"):
        allocated_hosts(slurm | {"SLURM_TASKS_PER_NODE": "1"})
    with pytest.raises(ConfigError, match="'many' is no list of counts"):
        allocated_hosts(slurm | {"SLURM_TASKS_PER_NODE": "many"})
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho Invalid hostlist >&2; exit 1\n")
    with pytest.raises(ConfigError, match="Invalid hostlist"):
        allocated_hosts(slurm)
    with pytest.raises(ConfigError, match="srun or scontrol is not on PATH; name hosts with -H"):
        allocated_hosts(slurm | {"PATH": str(tmp_path / "none")})


def test_nodes_of_an_allocation_are_reached_by_srun(slurm: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    backend = choose_backend(None, None, 5, Ssh())
    assert isinstance(backend, SshBackend) and [host.name for host in backend.hosts] == ["a1", "a2", "a3"]
    with pytest.raises(SlotsError, match="6 ranks need 6 slots, but a1:2, a2:2, a3:1 has 5"):
        choose_backend(None, None, 6, Ssh())
    assert isinstance(choose_backend("localhost:2", None, 2, Ssh()), LocalBackend)
    monkeypatch.setattr("farandole.launch.backends.is_local", lambda name: name == "a1")
    assert isinstance(choose_backend(None, None, 2, Ssh()), LocalBackend)  # the first node has room for both
    words = Srun().words("a1", "true")
    assert not any(word.startswith("--het-group") for word in words)
    assert words[-3:] == ["sh", "-c", "true"] and "--nodelist=a1" in words and "SLURM_NTASKS" in words


def test_nodes_of_all_components_of_a_heterogeneous_job(
    slurm: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """salloc sets the variables of the components only; in a batch script the others name the first component."""
    components = {
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "a1",
        "SLURM_TASKS_PER_NODE_HET_GROUP_0": "1",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "b1,b2",
        "SLURM_TASKS_PER_NODE_HET_GROUP_1": "2(x2)",
    }
    (tmp_path / "scontrol").write_text('#!/bin/sh\necho "$3" | tr , " "\n')
    below_salloc = {"PATH": slurm["PATH"], **components}
    batch = {**below_salloc, "SLURM_JOB_NODELIST": "a1", "SLURM_TASKS_PER_NODE": "1"}
    for env in (below_salloc, batch):
        assert allocated_hosts(env) == (Host("a1", 1), Host("b1", 2), Host("b2", 2))
    for name, value in batch.items():
        monkeypatch.setenv(name, value)
    site = find_site()
    assert site is not None
    shell = site.shell(Ssh(), timedelta(seconds=1))
    assert "--het-group=0" in shell.words("a1", "true") and "--het-group=1" in shell.words("b2", "true")
    with pytest.raises(ConfigError, match=r"SLURM_JOB_NODELIST_HET_GROUP_1: .*2 nodes, but SLURM_TASKS_PER_NODE_HET"):
        allocated_hosts(batch | {"SLURM_TASKS_PER_NODE_HET_GROUP_1": "2"})


def test_a_job_of_lsf_on_this_machine_alone_needs_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LSB_MCPU_HOSTS", "localhost 2")
    assert choose_backend(None, None, 3, Ssh()).hosts == (Host("localhost", 3),)
    monkeypatch.setenv("LSB_MCPU_HOSTS", "localhost 2 other.invalid 4 localhost 1")
    with pytest.raises(
        ConfigError, match=r"-H localhost:2,other\.invalid:4,localhost:1, or -H localhost:N for this one"
    ):
        choose_backend(None, None, 3, Ssh())
    assert choose_backend("localhost:3", None, 3, Ssh()).hosts == (Host("localhost", 3),)
