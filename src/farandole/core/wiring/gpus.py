"""How an engine treats tensors on GPUs: the files of NCCL, and the operations that must or must not go by it."""

import sysconfig
from pathlib import Path

from farandole.config import Config

__all__ = ["find_nccl", "kinds_by_route"]

_FILE = "libnccl.so.2"
_KINDS = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter")


def find_nccl() -> list[str]:
    """Return what the engine opens as NCCL, unless the process has loaded one: the linker's, else those of wheels."""
    wheels = Path(sysconfig.get_path("purelib")).glob(f"nvidia/*/lib/{_FILE}")
    return [_FILE, *sorted(map(str, wheels))]


def kinds_by_route(config: Config, route: str) -> list[str]:
    """Return the operations on GPUs for which `config` asks for this route."""
    return [kind for kind in _KINDS if getattr(config, f"gpu_{kind}") == route]
