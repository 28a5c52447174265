"""Rendezvous of the pods of a Kubernetes Indexed Job, served by rank 0 at its host name from a headless Service.

Kubernetes gives each pod its index, but no way to exchange bytes. So the manifest sets the number of ranks, the address
of rank 0 and the job's secret."""

import errno
import logging
import socket
from collections.abc import Mapping

from farandole.config import Config
from farandole.errors import ConfigError
from farandole.meeting.addresses import join_address, split_address
from farandole.meeting.handshake import LEAST_SECRET
from farandole.meeting.launched.hosted import HostedRendezvous
from farandole.meeting.server import RendezvousServer
from farandole.other_launchers import OtherLaunch
from farandole.topology import interface_address

log = logging.getLogger(__name__)

INDEX, SIZE = "JOB_COMPLETION_INDEX", "FARANDOLE_SIZE"
RENDEZVOUS, SECRET = "FARANDOLE_RENDEZVOUS", "FARANDOLE_SECRET"
PORT = 29400


def meet_in_indexed_job(found: OtherLaunch, config: Config, env: Mapping[str, str]) -> HostedRendezvous:
    """Make the rendezvous of this pod's rank; rank 0 serves it until `shutdown`. Does not wait for the others.

    Raises `ConfigError` when the manifest's variables are missing or wrong, or rank 0 cannot listen at its address."""
    rank, size = _number(env, INDEX), _number(env, SIZE)
    if rank >= size:
        raise ConfigError(
            SIZE, f"is {size}, but this pod has index {rank}; set it to the Job's completions and parallelism"
        )
    secret = _secret(env)
    address = env.get(RENDEZVOUS) or _address_of_rank_0(rank)
    if rank > 0:
        return HostedRendezvous([address], rank, size, secret, None)
    try:
        server = RendezvousServer(size, secret, host=_own_address(address, config), port=split_address(address)[1])
    except OSError as error:
        raise ConfigError(RENDEZVOUS, f"is {address}, where rank 0 cannot listen: {error.strerror}") from error
    log.info("rank 0 of %d serves the rendezvous at %s, as %s", size, server.address, address)
    # Rank 0 connects by address: its own name may be unknown until the pod is ready.
    return HostedRendezvous([server.address], rank, size, secret, server)


def warn_of_lone_pods(env: Mapping[str, str]) -> None:
    """Warn in each pod of an Indexed Job but the first that it trains alone, as the tasks of a sweep do."""
    if env.get(INDEX, "0") != "0" and not env.get(SIZE):
        log.warning(
            "this pod has index %s of an Indexed Job, and trains alone; to train together, set %s to the number of "
            "pods, and %s",
            env[INDEX],
            SIZE,
            SECRET,
        )


def _number(env: Mapping[str, str], name: str) -> int:
    text = env[name]
    if not text.isascii() or not text.isdigit():
        raise ConfigError(name, f"must be a whole number >= 0, got {text!r}")
    return int(text)


def _secret(env: Mapping[str, str]) -> bytes:
    try:
        secret = bytes.fromhex(env.get(SECRET, ""))
    except ValueError as error:
        raise ConfigError(SECRET, "is not written in hexadecimal digits; make one: openssl rand -hex 32") from error
    if len(secret) < LEAST_SECRET:
        problem = "is not set" if not secret else f"has {len(secret)} bytes"
        raise ConfigError(
            SECRET,
            f"{problem}; the pods prove by it that they belong together. Give all of them one of at least "
            f"{LEAST_SECRET} bytes from a Kubernetes Secret: openssl rand -hex 32",
        )
    return secret


def _address_of_rank_0(rank: int) -> str:
    """Return rank 0's address: the name of this pod, JOB-INDEX.SERVICE..., with index 0."""
    pod, dot, domain = socket.getfqdn().partition(".")
    if not dot or not pod.endswith(f"-{rank}"):
        raise ConfigError(
            RENDEZVOUS,
            f"is not set, and the name of this pod ({pod}{dot}{domain}) does not show rank 0's: give the Job's pods a "
            f"subdomain and a headless Service of that name, or set it to JOB-0.SERVICE:{PORT}",
        )
    return join_address(f"{pod.removesuffix(f'-{rank}')}-0.{domain}", PORT)


def _own_address(address: str, config: Config) -> str:
    """Return the address at which rank 0 listens: of the configured interface, else of `address` or its host name."""
    if config.interface is not None:
        return interface_address(config.interface)
    names = [split_address(address)[0], socket.gethostname()]
    for name in names:
        try:
            found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
        except OSError:
            continue  # a Service may publish the name of this pod later
        for family, _, _, _, target in found:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                if _binds(probe, target):
                    return str(target[0])
    raise ConfigError(
        RENDEZVOUS,
        f"is {address}, which is no address of this pod, although it has index 0; neither is {names[1]}. Name rank 0's "
        "pod, or a network with FARANDOLE_INTERFACE",
    )


def _binds(probe: socket.socket, target: tuple[object, ...]) -> bool:
    try:
        probe.bind(target)
    except OSError as error:
        if error.errno not in (errno.EADDRNOTAVAIL, errno.EINVAL):
            raise
        return False
    return True
