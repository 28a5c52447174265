"""Places of ranks on hosts, and the environment variables that give a process its place."""

import contextlib
import fcntl
import hashlib
import ipaddress
import os
import socket
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from farandole.errors import ConfigError

__all__ = [
    "CONTROL_DEGREE",
    "OF_ONE_PROCESS",
    "TORCH_PLACES",
    "TORCH_STORE",
    "JobEnvironment",
    "Topology",
    "host_identity",
    "host_name",
    "interface_address",
    "interface_addresses",
    "interface_names",
    "interface_of",
    "is_member_without_torch",
    "loopback_address",
    "own_addresses",
]

# Variables of torchrun: those of one process, and those of all.
TORCH_PLACES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
TORCH_STORE = ("MASTER_ADDR", "MASTER_PORT")
# Variables by which farandole's launchers give one process its place, as a rank or as a member of an elastic job. Ranks
# of a job that this process starts must not inherit them, because they would take its place.
OF_ONE_PROCESS = frozenset(
    {f"FARANDOLE_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")}
    | {f"FARANDOLE_{name}" for name in ("RENDEZVOUS", "SECRET", "GENERATION", "JOB", "TORCH_STORE", "SURVIVES")}
    | {f"FARANDOLE_MEMBER{name}" for name in ("", "_EXPECTS", "_LAUNCHER", "_SECRET")}
    | {"HOROVOD_ELASTIC"}
)
CONTROL_DEGREE = 8  # children of a host in the control tree: three hops reach 585 hosts

_GLOBAL = "00"  # the scope of an address in /proc/net/if_inet6
_UNUSABLE = 0x48  # IFA_F_TENTATIVE | IFA_F_DADFAILED of linux/if_addr.h
_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of a network interface


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The place of one rank: among all ranks, on its host (local), and among the ranks of its local rank (cross)."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    hosts: tuple[str, ...]  # hosts[r] is the identity of the host that runs rank r

    @classmethod
    def from_hosts(cls, rank: int, hosts: Sequence[str]) -> Self:
        """Make the place of `rank` from the host of each rank, see `all_from_hosts`."""
        if not 0 <= rank < len(hosts):
            raise ConfigError("rank", f"must be in 0..{len(hosts) - 1}, got {rank}")
        return cls.all_from_hosts(hosts)[rank]

    @classmethod
    def all_from_hosts(cls, hosts: Sequence[str]) -> list[Self]:
        """Make the places of all ranks from the host of each rank.

        Local ranks count the ranks of one host in rank order; cross ranks count the ranks with one local rank,
        so that on hosts with unequal numbers of ranks `cross_size` differs between local ranks."""
        hosts = tuple(hosts)
        on_host: Counter[str] = Counter()  # ranks so far
        with_local_rank: Counter[int] = Counter()
        numbers: list[tuple[int, int]] = []  # local and cross rank
        for host in hosts:
            local_rank = on_host[host]
            numbers.append((local_rank, with_local_rank[local_rank]))
            on_host[host] += 1
            with_local_rank[local_rank] += 1
        return [
            cls(
                rank=rank,
                size=len(hosts),
                local_rank=local_rank,
                local_size=on_host[hosts[rank]],
                cross_rank=cross_rank,
                cross_size=with_local_rank[local_rank],
                hosts=hosts,
            )
            for rank, (local_rank, cross_rank) in enumerate(numbers)
        ]

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks on this host, ascending, with this one."""
        here = self.hosts[self.rank]
        return tuple(rank for rank, host in enumerate(self.hosts) if host == here)

    @property
    def control_parents(self) -> list[int]:
        """The parent of each rank in the control tree, -1 for rank 0, its root.

        The parent of a rank is the first rank of its host. The first ranks of the hosts form a tree in rank order. So
        each rank has at most `local_size` - 1 + `CONTROL_DEGREE` children."""
        firsts: dict[str, int] = {}
        for rank, host in enumerate(self.hosts):
            firsts.setdefault(host, rank)
        leaders = list(firsts.values())
        above = {leader: leaders[(place - 1) // CONTROL_DEGREE] for place, leader in enumerate(leaders) if place > 0}
        return [-1 if rank == 0 else above.get(rank, firsts[host]) for rank, host in enumerate(self.hosts)]

    @property
    def host_numbers(self) -> list[int]:
        """The host of each rank as a number: hosts count from 0 in the order of their first ranks."""
        numbers: dict[str, int] = {}
        return [numbers.setdefault(host, len(numbers)) for host in self.hosts]

    @property
    def is_homogeneous(self) -> bool:
        """Return whether each host runs the same number of ranks."""
        return len(set(Counter(self.hosts).values())) == 1


def host_identity() -> str:
    """Return a name for this host. Processes with equal names share memory (/dev/shm) and the loopback interface.

    Two containers on one machine share the kernel, and often the host name, but neither of these."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    network = os.stat("/proc/self/ns/net").st_ino
    try:
        memory = os.stat("/dev/shm").st_dev
    except FileNotFoundError:
        memory = 0  # the segment has no name and does not need the folder
    name = socket.gethostname()
    digest = hashlib.sha256(f"{boot} {network} {memory} {name}".encode()).hexdigest()
    return f"{name}#{digest[:12]}"


def host_name(identity: str) -> str:
    """Return the name of the host with this identity, for people."""
    return identity.partition("#")[0]


def interface_names(interface: str) -> list[str]:
    """Return the names and addresses in `interface`, a list with commas. Raises `ConfigError` for an empty one."""
    names = [each.strip() for each in interface.split(",")]
    if not all(names):
        raise ConfigError("interface", f"{interface!r} has an empty name; write eth0, or eth0,ib0")
    return names


def interface_address(interface: str) -> str:
    """Return the first of the addresses that `interface_addresses` gives; raises what it raises."""
    return interface_addresses(interface)[0]


def interface_addresses(interface: str) -> list[str]:
    """Return the addresses that listeners bind for `interface`: an IP address, the name of a network interface, or a
    list of them with commas, of which this host must have at least one.

    A single address is not checked. Raises `ConfigError` naming the host's interfaces if it has none of the list."""
    names = interface_names(interface)
    found: list[str] = []
    errors: list[ConfigError] = []
    for name in names:
        try:
            found.append(_address_of(name, is_own=len(names) > 1))
        except ConfigError as error:
            errors.append(error)
    if not found:
        raise errors[0] if len(errors) == 1 else ConfigError("interface", "; ".join(each.problem for each in errors))
    return list(dict.fromkeys(found))


def _address_of(interface: str, *, is_own: bool) -> str:
    """Return the address of one name; with `is_own`, an address must be one of this host's."""
    names = [name for _, name in socket.if_nameindex()]
    if interface not in names:
        try:
            address = ipaddress.ip_address(interface)
        except ValueError as error:
            problem = f"{interface!r} is neither an address nor one of {', '.join(names)}"
            raise ConfigError("interface", problem) from error
        if is_own:
            _require_own(address)
        return str(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # struct ifreq: 16 bytes of name, then a sockaddr_in with the address at offset 4.
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
        except OSError as error:
            raise ConfigError("interface", f"{interface} has no IPv4 address ({error.strerror})") from error
    return socket.inet_ntoa(answer[20:24])


def _require_own(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    with socket.socket(socket.AF_INET if address.version == 4 else socket.AF_INET6, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((str(address), 0))
        except OSError as error:
            raise ConfigError("interface", f"{address} is no address of this host ({error.strerror})") from error


def interface_of(address: str) -> str | None:
    """Return the name of this host's interface that has `address` as its first IPv4 address or as an IPv6 address;
    None if there is none."""
    wanted = ipaddress.ip_address(address)
    for _, name in socket.if_nameindex():
        with contextlib.suppress(ConfigError):  # it has no address
            if interface_address(name) == str(wanted):
                return name
    return next((name for each, name in _ipv6_addresses() if each == wanted), None)


def _ipv6_addresses() -> list[tuple[ipaddress.IPv6Address, str]]:
    """Return this host's usable IPv6 addresses, without link-local ones, and their interfaces."""
    found = []
    with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            digits, _, _, scope, flags, name = line.split()
            if scope == _GLOBAL and not int(flags, 16) & _UNUSABLE:
                found.append((ipaddress.IPv6Address(bytes.fromhex(digits)), name))
    return found


def own_addresses() -> list[str]:
    """Return this host's addresses: of the loopback interface first, then of each interface IPv4 before IPv6.

    Link-local addresses (fe80::) are left out, because they are valid only with the name of an interface."""
    found = [loopback_address()]
    for _, name in socket.if_nameindex():
        with contextlib.suppress(ConfigError):  # it has none
            found.append(interface_address(name))
    found += [str(address) for address, _ in _ipv6_addresses()]
    usable = [each for each in found[1:] if not ipaddress.ip_address(each).is_loopback]
    return list(dict.fromkeys([found[0], *usable]))


def loopback_address() -> str:
    """Return the address by which processes of this machine reach each other: 127.0.0.1, or ::1 if it has no IPv4.

    Raises `ConfigError` when the loopback interface is down or has neither."""
    problems = []
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.bind((address, 0))
                probe.connect(probe.getsockname())  # of a datagram socket: sends nothing
        except OSError as error:
            problems.append(f"{address}: {error.strerror}")
        else:
            return address
    raise ConfigError("interface", f"lo is down or has no address ({'; '.join(problems)}); run: ip link set lo up")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnvironment:
    """The environment variables that a launcher sets for a rank; local and cross ranks are optional."""

    rank: int
    size: int
    rendezvous: str  # "host:port"
    secret: bytes = field(repr=False)
    generation: int = 0
    job: str = ""
    local_rank: int | None = None
    local_size: int | None = None
    cross_rank: int | None = None
    cross_size: int | None = None
    torch_store: str = ""  # "host:port" at which rank 0 can serve torch's store
    host: str = ""  # the name of the rank's host, for programs of Horovod

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ConfigError("FARANDOLE_RANK", f"rank {self.rank} of {self.size} ranks cannot be")
        if self.generation < 0:
            raise ConfigError("FARANDOLE_GENERATION", f"must be >= 0, got {self.generation}")

    @classmethod
    def read(cls, env: Mapping[str, str] | None = None) -> Self | None:
        """Read the job's variables from `env` (default: `os.environ`); return None if no launcher has set them.

        Raises `ConfigError` if only some of them are set, or one is invalid."""
        env = os.environ if env is None else env
        needed = ("FARANDOLE_RANK", "FARANDOLE_SIZE", "FARANDOLE_RENDEZVOUS", "FARANDOLE_SECRET")
        missing = [name for name in needed if not env.get(name)]
        if len(missing) == len(needed):
            return None
        if "FARANDOLE_RANK" in missing and env.get("JOB_COMPLETION_INDEX"):
            return None  # an Indexed Job sets the others in all of its pods, see meeting/launched/indexed_job.py
        if missing:
            raise ConfigError(missing[0], f"is not set, though {_others(needed, missing)} is; let a launcher set all")
        try:
            secret = bytes.fromhex(env["FARANDOLE_SECRET"])
        except ValueError as error:
            raise ConfigError("FARANDOLE_SECRET", "is not written in hexadecimal digits") from error
        return cls(
            rank=_whole_number(env, "FARANDOLE_RANK"),
            size=_whole_number(env, "FARANDOLE_SIZE"),
            rendezvous=env["FARANDOLE_RENDEZVOUS"],
            secret=secret,
            generation=_whole_number(env, "FARANDOLE_GENERATION", 0),
            job=env.get("FARANDOLE_JOB", ""),
            torch_store=env.get("FARANDOLE_TORCH_STORE", ""),
            host=env.get("HOROVOD_HOSTNAME", ""),
            **{
                name: _whole_number(env, f"FARANDOLE_{name.upper()}")
                for name in _PLACES
                if env.get(f"FARANDOLE_{name.upper()}")
            },
        )

    @classmethod
    def of(cls, topology: Topology, *, host: str, rendezvous: str, secret: bytes, job: str, torch_store: str) -> Self:
        """Make the variables of the rank at `topology`, on the host named `host`."""
        places = {name: getattr(topology, name) for name in ("rank", "size", *_PLACES)}
        return cls(host=host, rendezvous=rendezvous, secret=secret, job=job, torch_store=torch_store, **places)

    @classmethod
    def without_torch(cls, env: Mapping[str, str] | None = None) -> Self | None:
        """Return the job of `env` if `env://` of torch has to find it without torch's variables, else None."""
        env = os.environ if env is None else env
        job = cls.read(env)
        return None if job is None or not job.torch_store or env.get("MASTER_ADDR") else job

    def write(self, *, torch_env: bool = False) -> dict[str, str]:
        """Return the variables for the rank's process: farandole's, and Horovod's, which user scripts read.

        With `torch_env` add those of torchrun, by which programs of torch.distributed start a process group. A program
        of Horovod must not see them: libraries below it would divide the rank's share of the data once more."""
        places = {"RANK": self.rank, "SIZE": self.size}
        for name in _PLACES:
            value: int | None = getattr(self, name)
            if value is not None:
                places[name.upper()] = value
        variables = {
            f"{prefix}_{name}": str(value) for prefix in ("FARANDOLE", "HOROVOD") for name, value in places.items()
        }
        variables["FARANDOLE_RENDEZVOUS"] = self.rendezvous
        variables["FARANDOLE_SECRET"] = self.secret.hex()
        variables["FARANDOLE_GENERATION"] = str(self.generation)
        variables["FARANDOLE_JOB"] = self.job
        if self.torch_store:
            variables["FARANDOLE_TORCH_STORE"] = self.torch_store
        if self.host:
            variables["HOROVOD_HOSTNAME"] = self.host
        return variables | self._of_torch() if torch_env else variables

    def _of_torch(self) -> dict[str, str]:
        host, _, port = self.torch_store.rpartition(":")
        places = dict(zip(TORCH_PLACES, (self.rank, self.size, self.local_rank, self.local_size), strict=True))
        variables = {name: str(value) for name, value in places.items() if value is not None}
        return variables | dict(zip(TORCH_STORE, (host.strip("[]"), port), strict=True))


def is_member_without_torch() -> bool:
    """Return whether this is a process of an elastic job, for which `env://` of torch has no variables."""
    return bool(os.environ.get("FARANDOLE_MEMBER")) and not os.environ.get("MASTER_ADDR")


_PLACES = ("local_rank", "local_size", "cross_rank", "cross_size")


def _others(needed: Sequence[str], missing: Sequence[str]) -> str:
    return next(name for name in needed if name not in missing)


def _whole_number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name, "")
    if not text and default is not None:
        return default
    if not text.isascii() or not text.isdigit():
        raise ConfigError(name, f"must be a whole number >= 0, got {text!r}")
    return int(text)
