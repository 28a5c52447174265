"""Exchange of bytes between the processes of torchrun, by torch's store."""

import contextlib
from collections.abc import Mapping
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from farandole.config import Config
from farandole.errors import ConfigError, RendezvousError
from farandole.meeting.frames import Deadline
from farandole.meeting.launched.hosted import HostedRendezvous, meet
from farandole.other_launchers import OtherLaunch

__all__ = ["StoreExchange", "meet_by_store"]


def meet_by_store(found: OtherLaunch, config: Config, env: Mapping[str, str]) -> HostedRendezvous:
    """Let the ranks of torchrun meet at torch's store; blocks and raises like `meet`.

    Raises `ConfigError` at once if RANK is no number below WORLD_SIZE, because no store would answer such a rank."""
    assert found.size is not None
    deadline = Deadline(config.start_timeout)
    rank = env["RANK"].strip()
    if not rank.isascii() or not rank.isdigit() or int(rank) >= found.size:
        raise ConfigError("RANK", f"must be a whole number below WORLD_SIZE ({found.size}), got {rank!r}")
    return meet(StoreExchange(int(rank), found.size, deadline), config, deadline, found)


class StoreExchange:
    """Exchange by the store at MASTER_ADDR and MASTER_PORT: torchrun's store, or one that rank 0 serves meanwhile.

    The constructor blocks until the store answers, up to `deadline`; raises `RendezvousError`. Everybody who can reach
    the store can read its contents."""

    def __init__(self, rank: int, size: int, deadline: Deadline) -> None:
        self.rank, self.size = rank, size
        try:
            seconds = timedelta(seconds=deadline.remaining())
            store, _, _ = next(iter(rendezvous("env://", rank, size, timeout=seconds)))
            self._store = PrefixStore("farandole/init", store)
            # The nth call of init on one rank belongs to the nth call on every other rank.
            self._key = f"card/{self._store.add(f'calls/{rank}', 1)}"
        except ValueError as error:  # a variable is missing
            raise ConfigError("MASTER_ADDR", str(error)) from error
        except TimeoutError as error:  # the import of torch took it all
            raise RendezvousError(
                f"rank {rank} had no time left to reach torch's store ({error}); raise FARANDOLE_START_TIMEOUT"
            ) from error
        except RuntimeError as error:  # of all kinds
            raise RendezvousError(f"rank {rank} could not reach torch's store: {error}") from error

    def share(self, payload: bytes, deadline: Deadline) -> bytes:
        """Return rank 0's `payload` on every rank; blocks up to `deadline`, then raises `RendezvousError`."""
        try:
            if self.rank == 0:
                self._store.set(self._key, payload)  # type: ignore[arg-type]  # it takes bytes, too
            self._store.wait([self._key], timedelta(seconds=deadline.remaining()))
            return bytes(self._store.get(self._key))
        except (RuntimeError, TimeoutError) as error:  # stores raise different errors at the timeout
            raise RendezvousError(f"rank 0 did not come to torch's store ({error})", missing=(0,)) from error

    def close(self) -> None:
        """Remove the payload."""
        with contextlib.suppress(RuntimeError):  # the store is gone, and the payload with it
            self._store.delete_key(self._key)
