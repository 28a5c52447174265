"""`horovod.data`: loaders that read ahead on a thread, and leave none behind."""

import threading
from collections.abc import Iterator

import pytest

from farandole.compat import install, uninstall
from farandole.compat.data_loader import AsyncDataLoaderMixin, BaseDataLoader


class Numbers(BaseDataLoader):
    def __init__(self, count: int, fails_at: int | None = None) -> None:
        self.count, self.fails_at, self.made = count, fails_at, 0
        self.enough = threading.Semaphore(0)

    def __len__(self) -> int:
        return self.count

    def _iterate(self) -> Iterator[int]:
        for number in range(self.count):
            if number == self.fails_at:
                raise OSError(f"no batch {number}")
            self.made += 1
            self.enough.release()
            yield number

    def _process_batch(self, batch: int) -> int:
        return batch * 10


class AsyncNumbers(AsyncDataLoaderMixin, Numbers):
    pass


def test_horovods_names() -> None:
    install()
    try:
        from horovod.data import AsyncDataLoaderMixin as Mixin
        from horovod.data.data_loader_base import BaseDataLoader as Base
    finally:
        uninstall()
    assert (Mixin, Base) == (AsyncDataLoaderMixin, BaseDataLoader)


@pytest.mark.parametrize("ahead", [0, 1, 3, 64])
def test_every_batch_once_per_epoch(ahead: int) -> None:
    loader = AsyncNumbers(ahead, False, 5)
    for _ in range(2):
        assert list(loader) == [0, 10, 20, 30, 40]
    assert len(loader) == 5
    assert list(AsyncNumbers(ahead, count=0)) == []


def test_it_reads_ahead_but_no_further() -> None:
    loader = AsyncNumbers(3, True, 100)
    batches = iter(loader)
    assert next(batches) == 0
    # One is taken, three wait, and one is in the thread's hands.
    for _ in range(5):
        assert loader.enough.acquire(timeout=20)
    assert loader.made == 5
    batches.close()
    assert loader.made <= 6


def test_what_goes_wrong_reaches_who_iterates_after_what_went_well() -> None:
    seen = []
    with pytest.raises(OSError, match="no batch 2"):
        for batch in AsyncNumbers(64, False, 5, fails_at=2):
            seen.append(batch)
    assert seen == [0, 10]


def test_closing_ends_an_epoch() -> None:
    loader = AsyncNumbers(1, False, 100)
    batches = iter(loader)
    assert next(batches) == 0
    loader.close_async_loader()
    loader.close_async_loader()
    assert list(batches) == []
    assert next(iter(loader)) == 0  # a new one


def test_a_loader_that_says_nothing() -> None:
    loader = BaseDataLoader()
    for call in (lambda: len(loader), lambda: list(loader)):
        with pytest.raises(NotImplementedError):
            call()
    assert loader._process_batch(3) == 3
