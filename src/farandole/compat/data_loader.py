"""The base classes of `horovod.data` for a program's own data loaders."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator

log = logging.getLogger(__name__)


class BaseDataLoader:
    """Base of loaders: subclasses define `__len__` and `_iterate`, and may override `_process_batch`."""

    def __len__(self) -> int:
        raise NotImplementedError

    def _iterate(self) -> Iterable[object]:
        raise NotImplementedError

    def _process_batch(self, batch: object) -> object:
        return batch

    def __iter__(self) -> Iterator[object]:
        for batch in self._iterate():
            yield self._process_batch(batch)


class AsyncDataLoaderMixin(BaseDataLoader):
    """Mixin in front of a loader's class: a thread makes up to `async_loader_queue_size` batches ahead.

    With a size of 0 there is no thread. The thread ends with its epoch, when the iteration is abandoned, or by
    `close_async_loader`. An exception of `_iterate` is raised again in the iteration."""

    _ahead: "_Ahead | None" = None

    def __init__(
        self, async_loader_queue_size: int = 64, debug_data_loader: bool = False, *args: object, **kwargs: object
    ) -> None:
        super().__init__(*args, **kwargs)
        self.async_loader_queue_size, self.debug_data_loader = async_loader_queue_size, debug_data_loader

    def close_async_loader(self) -> None:
        """End the thread of the current epoch. Blocks until the thread has finished the batch that it is making."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def __iter__(self) -> Iterator[object]:
        if self.async_loader_queue_size <= 0:
            yield from super().__iter__()
            return
        self.close_async_loader()
        ahead = self._ahead = _Ahead(self._iterate, self.async_loader_queue_size)
        try:
            for number, batch in enumerate(ahead):
                if self.debug_data_loader:
                    log.info("batch %d, %d more are ready", number, ahead.ready)
                yield self._process_batch(batch)
        finally:
            ahead.close()


class _Ahead:
    """The batches of one epoch, which a thread makes ahead of their use."""

    def __init__(self, make: Callable[[], Iterable[object]], most: int) -> None:
        self._make, self._most = make, most
        self._changed = threading.Condition()
        self._batches: deque[object] = deque()
        self._ended = self._closed = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="farandole-loader", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[object]:
        while True:
            with self._changed:
                # The thread sets `_ended` on every way out.
                self._changed.wait_for(lambda: self._batches or self._ended or self._closed)
                if self._closed or not self._batches:
                    break
                batch = self._batches.popleft()
                self._changed.notify_all()
            yield batch
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _work(self) -> None:
        failure: BaseException | None = None
        try:
            for batch in self._make():
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or len(self._batches) < self._most)
                    if self._closed:
                        break
                    self._batches.append(batch)
                    self._changed.notify_all()
        except BaseException as error:
            failure = error  # raised again by __iter__
        with self._changed:
            self._failure, self._ended = failure, True
            self._changed.notify_all()
