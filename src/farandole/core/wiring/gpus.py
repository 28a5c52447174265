"""Settings of an engine for tensors on GPUs: the files of NCCL, its interface, and the route of each operation."""

import os
import sysconfig
from pathlib import Path

from farandole.config import Config
from farandole.topology import interface_of

__all__ = ["connect_nccl_by", "find_nccl", "kinds_by_route"]

_FILE = "libnccl.so.2"
_KINDS = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter")


def find_nccl() -> list[str]:
    """Return what the engine opens as NCCL, unless the process has loaded one: the linker's, else those of wheels."""
    wheels = Path(sysconfig.get_path("purelib")).glob(f"nvidia/*/lib/{_FILE}")
    return [_FILE, *sorted(map(str, wheels))]


def connect_nccl_by(address: str) -> None:
    """Let NCCL connect by this host's interface with `address`, unless NCCL_SOCKET_IFNAME says by which.

    NCCL reads that variable in this process when it makes its first communicator."""
    name = interface_of(address)
    if name is not None:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # =: this name, not those that begin with it


def kinds_by_route(config: Config, route: str) -> list[str]:
    """Return the operations on GPUs for which `config` asks for this route."""
    return [kind for kind in _KINDS if getattr(config, f"gpu_{kind}") == route]
