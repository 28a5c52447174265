"""Settings of an engine for tensors on GPUs: NCCL's files and interface, and the route of each operation."""

import os
import sysconfig
from pathlib import Path

from farandole.config import Config
from farandole.core.operations.kinds import NAMES
from farandole.topology import interface_of

_FILE = "libnccl.so.2"


def find_nccl() -> list[str]:
    """Return the files to open as NCCL if the process has not loaded it: the linker's, then those of wheels."""
    wheels = Path(sysconfig.get_path("purelib")).glob(f"nvidia/*/lib/{_FILE}")
    return [_FILE, *sorted(map(str, wheels))]


def connect_nccl_by(address: str) -> None:
    """Set NCCL_SOCKET_IFNAME to this host's interface with `address`, unless it is set.

    NCCL reads the variable from the environment of this process when it makes its first communicator."""
    name = interface_of(address)
    if name is not None:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # =: exactly this name, not all that begin with it


def kinds_by_route(config: Config, route: str) -> list[str]:
    """Return the kinds of operations on GPUs for which `config` sets `route`."""
    return [kind for kind in NAMES if getattr(config, f"gpu_{kind}", "") == route]


def may_share_gpu() -> bool:
    """Return whether NCCL's own variable allows several ranks on one GPU."""
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
