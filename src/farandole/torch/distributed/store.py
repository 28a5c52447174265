"""The store that `init_process_group` gives a process group, as the place where its ranks meet."""

import hashlib
import hmac
import ipaddress
import json
import os
import socket
from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistNetworkError

from farandole.errors import RendezvousError
from farandole.handshake import join_address, split_address

__all__ = ["StoreRendezvous", "address_seen"]

SEED_BYTES = 32


class StoreRendezvous:
    """Meets the other ranks at a c10d store, of which nothing is trusted but that it is there.

    The ranks' secret is made of the job's, `secret`, and of a seed that rank 0 puts into the store; without a job's
    secret it is as safe as the store. Making one blocks until all ranks have come, up to `timeout`; raises
    `RendezvousError` naming who did not."""

    def __init__(self, store: Store, rank: int, size: int, *, secret: bytes | None, timeout: timedelta) -> None:
        self.rank, self.size = rank, size
        self._store, self._round = store, 0
        # A store may outlive the group: torchrun's agent keeps one for all groups that its ranks ever make.
        self.generation = (store.add("farandole/arrivals", 1) - 1) // size
        card = json.dumps([os.urandom(SEED_BYTES).hex(), _address_of(store)])
        cards = [json.loads(each) for each in self.allgather(card.encode(), timeout=timeout)]
        self.secret = hmac.digest(secret or b"", bytes.fromhex(cards[0][0]), hashlib.sha256)
        self.address = address_seen(rank, [each for _, each in cards])

    def allgather(self, payload: bytes, *, timeout: timedelta) -> list[bytes]:
        """Give `payload` to all ranks and return everybody's in rank order.

        Blocks until every rank has called, up to `timeout`; raises `RendezvousError` naming who did not."""
        store = self._store
        keys = [f"farandole/{self.generation}/{self._round}/{rank}" for rank in range(self.size)]
        try:
            store.set(keys[self.rank], payload)  # type: ignore[arg-type]  # it takes bytes, too
            store.wait(keys, timeout)
            payloads = store.multi_get(keys)
        except DistNetworkError as error:
            raise RendezvousError(f"the process group's store is gone ({error})") from error
        except RuntimeError as error:  # what a store raises when the time is over differs between stores
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            if not missing:
                raise
            raise RendezvousError("ranks did not come to the process group's store", missing) from error
        self._round += 1
        return payloads

    def close(self) -> None:
        """The store is torch's; nothing is held."""


def address_seen(rank: int, addresses: Sequence[str | None]) -> str | None:
    """Return where `rank` finds the store, when all ranks have resolved its name to `addresses`; None: on this host.

    A host may know itself by a loopback address (Debian's do), which no other host reaches; then the others' view
    counts."""
    known = [each for each in (addresses[rank], *addresses) if each is not None and not _is_loopback(each)]
    return known[0] if known else None


def _address_of(store: Store) -> str | None:
    """Where ranks reach the store, as this host resolves it; None when it is in memory or a file."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return None
    found = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_STREAM)
    return join_address(str(found[0][4][0]), store.port)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(split_address(address)[0]).is_loopback
