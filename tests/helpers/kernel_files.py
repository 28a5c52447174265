"""Files like the kernel's, with which a host seems to have an interconnect."""

from pathlib import Path


def add_port(
    root: Path, device: str = "mlx5_0", *, state: str = "4: ACTIVE", link: str = "InfiniBand", file: str | None = ""
) -> None:
    """Add a port of `device`. `file` is its file in dev: by default InfiniBand's; None, as in a container, for none."""
    port = root / "sys" / "class" / "infiniband" / device / "ports" / "1"
    port.mkdir(parents=True)
    for name, text in {"state": state, "link_layer": link, "rate": "200 Gb/sec (4X HDR)"}.items():
        (port / name).write_text(f"{text}\n")
    if file is not None:
        _add_file(root, file or "infiniband/uverbs0")


def add_slingshot(root: Path, *, file: str | None = "cxi0") -> None:
    """Add a Slingshot card, and its file in dev unless `file` is None."""
    (root / "sys" / "class" / "cxi" / "cxi0").mkdir(parents=True)
    if file is not None:
        _add_file(root, file)


def _add_file(root: Path, name: str) -> None:
    path = root / "dev" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
