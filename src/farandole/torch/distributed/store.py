"""Rendezvous at the store that `init_process_group` gives a process group."""

import hashlib
import hmac
import ipaddress
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistNetworkError

from farandole.errors import RendezvousError
from farandole.meeting.addresses import join_address, split_address
from farandole.meeting.rendezvous import Rendezvous

__all__ = ["StoreRendezvous", "address_seen"]

SEED_BYTES = 32
LOOK_EVERY = timedelta(seconds=0.1)  # for lost ranks


class StoreRendezvous(Rendezvous):
    """Rendezvous at a c10d store, whose contents are not trusted.

    The ranks' secret is derived from the job's, `secret`, and from a seed that rank 0 puts into the store; without a
    job's secret it is as safe as the store. The constructor blocks until all ranks have arrived, up to `timeout`;
    raises `RendezvousError` naming the missing ones. `require_alive` raises an error if one of them is known to be
    lost."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        secret: bytes | None,
        timeout: timedelta,
        require_alive: Callable[[], None] | None = None,
    ) -> None:
        self.rank, self.size, self._require_alive = rank, size, require_alive
        self._store, self._round = store, 0
        # A store may outlive the group: torchrun's agent keeps one for all groups of its ranks.
        self.generation = (store.add("farandole/arrivals", 1) - 1) // size
        card = json.dumps([os.urandom(SEED_BYTES).hex(), _address_of(store)])
        cards = [json.loads(each) for each in self.allgather(card.encode(), timeout=timeout)]
        self.secret = hmac.digest(secret or b"", bytes.fromhex(cards[0][0]), hashlib.sha256)
        self.address = address_seen(rank, [each for _, each in cards])

    def allgather(self, payload: bytes, *, timeout: timedelta) -> list[bytes]:
        """Give `payload` to all ranks and return all payloads in rank order.

        Blocks until every rank has called, up to `timeout`; raises `RendezvousError` naming the missing ranks."""
        store = self._store
        keys = [f"farandole/{self.generation}/{self._round}/{rank}" for rank in range(self.size)]
        try:
            store.set(keys[self.rank], payload)  # type: ignore[arg-type]  # it takes bytes, too
            self._wait(keys, timeout)
            payloads = store.multi_get(keys)
        except DistNetworkError as error:
            raise RendezvousError(f"the process group's store is gone ({error})") from error
        except RuntimeError as error:  # stores raise different errors at the timeout
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            if not missing:
                raise
            raise RendezvousError("ranks did not come to the process group's store", missing) from error
        self._round += 1
        return payloads

    def _wait(self, keys: list[str], timeout: timedelta) -> None:
        """Wait for the keys; where ranks may be lost, look for that meanwhile."""
        end = time.monotonic() + timeout.total_seconds()
        while self._require_alive is not None and time.monotonic() + LOOK_EVERY.total_seconds() < end:
            self._require_alive()
            try:
                return self._store.wait(keys, LOOK_EVERY)
            except DistNetworkError:
                raise
            except RuntimeError:  # stores raise different errors at the timeout
                continue
        return self._store.wait(keys, timedelta(seconds=max(0.001, end - time.monotonic())))


def address_seen(rank: int, addresses: Sequence[str | None]) -> str | None:
    """Return where `rank` reaches the store, whose name the ranks resolved to `addresses`; None: on this host.

    A host may resolve itself to a loopback address (Debian's do), which no other host reaches; then the others' view
    counts."""
    known = [each for each in (addresses[rank], *addresses) if each is not None and not _is_loopback(each)]
    return known[0] if known else None


def _address_of(store: Store) -> str | None:
    """Return the store's address as this host resolves it; None if it is in memory or a file."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return None
    found = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_STREAM)
    return join_address(str(found[0][4][0]), store.port)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(split_address(address)[0]).is_loopback
