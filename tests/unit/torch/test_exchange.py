"""The exchange by torch's store, without other ranks."""

from collections.abc import Iterator
from datetime import timedelta

import pytest

pytest.importorskip("torch")

import torch.distributed as dist

from farandole.config import Config
from farandole.errors import ConfigError, RendezvousError
from farandole.meeting.frames import Deadline
from farandole.other_launchers import find_other_launch
from farandole.torch.distributed import exchange
from farandole.torch.distributed.exchange import StoreExchange, meet_by_store


class LostStore(dist.Store):
    """A store whose server ended right after the connection."""

    def add(self, key: str, value: int) -> int:
        raise dist.DistNetworkError("failed to recv, got 0 bytes")


def test_a_store_that_is_lost_at_once_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def rendezvous(*_: object, **__: object) -> Iterator[tuple[dist.Store, int, int]]:
        yield LostStore(), 1, 2

    monkeypatch.setattr(exchange, "rendezvous", rendezvous)
    with pytest.raises(RendezvousError, match=r"rank 1 could not reach torch's store: .*got 0 bytes"):
        StoreExchange(1, 2, Deadline(timedelta(seconds=5)))


def test_a_start_that_took_all_the_time_names_its_limit() -> None:
    """The import of torch may take longer than the whole start may."""
    with pytest.raises(RendezvousError, match=r"rank 1 had no time left .*within 0 s.*; raise FARANDOLE_START_TIMEOUT"):
        StoreExchange(1, 2, Deadline(timedelta(0)))


@pytest.mark.parametrize("rank", ["2", "-1", "x", "1.0"])
def test_a_rank_that_cannot_be_is_named_at_once(rank: str) -> None:
    env = {"WORLD_SIZE": "2", "RANK": rank, "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29500"}
    found = find_other_launch(env)
    assert found is not None and found.launcher.meet
    with pytest.raises(ConfigError, match=rf"RANK: must be a whole number below WORLD_SIZE \(2\), got '{rank}'"):
        meet_by_store(found, Config(start_timeout=timedelta(seconds=1)), env)
