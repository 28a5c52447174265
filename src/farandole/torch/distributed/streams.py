"""CUDA streams around the results of a process group's operations.

Waiting for an operation makes the thread's current stream wait for its result. Other threads and other streams wait
for a `Mark`."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch
from torch.futures import Future

__all__ = ["Mark", "SideStreams", "cuda", "gpus_of", "new_future", "note_use"]

T = TypeVar("T")
Tensor = torch.Tensor

cuda = torch.cuda  # tests put a stand-in here


def gpus_of(tensors: Iterable[Tensor]) -> list[torch.device]:
    """Return the GPUs on which tensors lie, each once."""
    return sorted({tensor.device for tensor in tensors if tensor.is_cuda}, key=str)


class Mark:
    """The point after the work that is in this thread's current stream of each GPU."""

    def __init__(self, gpus: Sequence[torch.device]) -> None:
        self._events = [(gpu, cuda.current_stream(gpu).record_event()) for gpu in gpus]

    def hold(self) -> None:
        """Make the current streams of the calling thread wait for this point; blocks no thread."""
        for gpu, event in self._events:
            cuda.current_stream(gpu).wait_event(event)


class SideStreams:
    """Streams of one thread, one per GPU, in which it waits for results without delaying the program's streams."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @contextmanager
    def current(self, gpus: Sequence[torch.device]) -> Iterator[None]:
        """Make them the thread's current streams of `gpus`."""
        with ExitStack() as entered:
            for gpu in gpus:
                if gpu not in self._streams:
                    self._streams[gpu] = cuda.Stream(gpu)
                entered.enter_context(cuda.stream(self._streams[gpu]))
            yield


def note_use(tensor: Tensor) -> None:
    """Register with torch's allocator that the current stream uses `tensor`, which another stream may have made."""
    if tensor.is_cuda:
        tensor.record_stream(cuda.current_stream(tensor.device))


def new_future(gpus: Sequence[torch.device]) -> Future[T]:
    """Return a future whose waiters' current streams wait for the streams in which its value is set."""
    return Future(devices=list(gpus)) if gpus else Future()
