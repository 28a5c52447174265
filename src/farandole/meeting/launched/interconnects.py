"""Interconnects of this host that a site's MPI uses better than TCP does: InfiniBand, Omni-Path, Slingshot."""

import os
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")  # of the file system that has /sys and /dev


@dataclass(frozen=True, slots=True)
class Interconnect:
    """A port of a network device, described by `name`; `obstacle` says why MPI is not used there, if it is not."""

    name: str
    obstacle: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.obstacle}" if self.obstacle else self.name


def find_interconnects(root: Path | None = None) -> list[Interconnect]:
    """Return the ports of all devices, sorted, from the kernel's files below `root` (default: this machine's)."""
    root = ROOT if root is None else root
    ports = sorted((root / "sys/class/infiniband").glob("*/ports/*"))
    cards = sorted((root / "sys/class/cxi").glob("*"))
    return [*(_port(root, each) for each in ports), *(_slingshot(root, each.name) for each in cards)]


def _port(root: Path, port: Path) -> Interconnect:
    """Describe a port of a device with InfiniBand's interface.

    Ports with Ethernet (RoCE, iWARP) have an obstacle: many servers have such devices by chance, in networks that are
    not set up for them."""
    device = port.parent.parent.name
    is_omni_path = device.startswith("hfi1")
    obstacle = ""
    if not _read(port / "state").endswith(": ACTIVE"):
        obstacle = "it is not active"
    elif _read(port / "link_layer") != "InfiniBand":
        obstacle = "its link is Ethernet; FARANDOLE_FABRIC=mpi asks for MPI there"
    elif not (_may_open(root, "infiniband/uverbs*") or (is_omni_path and _may_open(root, "hfi1_*"))):
        obstacle = _no_device("/dev/infiniband/uverbs*")
    kind = "Omni-Path" if is_omni_path else "InfiniBand"
    return Interconnect(f"{kind} {device} port {port.name} ({_read(port / 'rate')})", obstacle)


def _slingshot(root: Path, device: str) -> Interconnect:
    return Interconnect(f"Slingshot {device}", "" if _may_open(root, device) else _no_device(f"/dev/{device}"))


def _may_open(root: Path, pattern: str) -> bool:
    """Return whether this process may open such a device file. Containers see their host's devices in /sys alone."""
    return any(os.access(path, os.R_OK | os.W_OK) for path in (root / "dev").glob(pattern))


def _no_device(files: str) -> str:
    return f"there is no {files} that this process may open"


def _read(file: Path) -> str:
    """Return the text of a kernel's file; "unknown" if it cannot be read, as when the device has just been removed."""
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return "unknown"
