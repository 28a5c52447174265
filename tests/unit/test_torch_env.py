"""`env://` of torch.distributed in a farandole job without torchrun's variables."""

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

from torch._C._distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from farandole.launch.reserved import ReservedPort
from farandole.topology import JobEnvironment
from farandole.torch_env import find_stores_of_jobs

TORCHS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of the store of a job of one rank, this process."""
    find_stores_of_jobs()
    with ReservedPort() as reserved:
        address = f"127.0.0.1:{reserved.port}"
        job = JobEnvironment(rank=0, size=1, rendezvous="h:1", secret=b"s" * 32, torch_store=address)
        for name in TORCHS:
            monkeypatch.delenv(name, raising=False)
        for name, value in job.write().items():
            monkeypatch.setenv(name, value)
        yield address


def test_the_launchers_store_is_found(store: str) -> None:
    found, rank, size = next(rendezvous("env://"))
    assert (f"{found.host}:{found.port}", rank, size) == (store, 0, 1)


def test_torchs_own_variables_win(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with ReservedPort() as other:
        for name, value in zip(TORCHS, ("0", "1", "127.0.0.1", str(other.port)), strict=True):
            monkeypatch.setenv(name, value)
        found: Any = next(rendezvous("env://"))[0]
        assert isinstance(found, Store) and found.port == other.port  # type: ignore[attr-defined]


def test_a_program_may_name_rank_and_size_itself(store: str) -> None:
    assert next(rendezvous("env://", 0, 1))[1:] == (0, 1)


def test_outside_of_jobs_torch_names_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    find_stores_of_jobs()
    for name in TORCHS:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="RANK expected"):
        next(rendezvous("env://"))
