"""Process group of ranks that come and go, with torchft's contract: a manager forms it anew when they change.

manager = torchft.Manager(pg=ElasticProcessGroup(), ...)"""

import json
import socket
import uuid
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from farandole.config import Config
from farandole.errors import ConfigError, EngineClosed, FarandoleError, InvalidRequest
from farandole.meeting.addresses import join_address, split_address
from farandole.topology import JobEnvironment
from farandole.torch.distributed.group import FarandoleGroup
from farandole.torch.distributed.named_group import NamedGroup
from farandole.torch.distributed.store import StoreRendezvous
from farandole.torch.distributed.work import Follower, Work

__all__ = ["ElasticProcessGroup"]

TIMEOUT = timedelta(seconds=60)  # torchft's


class Reconfiguring(Protocol):
    """The fields of torchft's `ReconfigureOptions` that name the ranks."""

    @property
    def uuid(self) -> int: ...

    @property
    def handles(self) -> Sequence[str]: ...


class ElasticProcessGroup(FarandoleGroup):
    """Process group without ranks until `configure` or `reconfigure` is called, any number of times.

    When a rank is lost, operations in flight raise `PeerLost` on the others within milliseconds, and later ones raise
    it, too, until the group is configured again. `timeout` is that of meeting and of each operation."""

    supports_reconfigure = True
    _device_types: Sequence[torch.device] = ()  # type: ignore[assignment]  # torch's own groups have backends for them

    def __init__(self, timeout: timedelta = TIMEOUT) -> None:
        NamedGroup.__init__(self, 0, 1, "", "")
        self._timeout, self._id = timeout, uuid.uuid4().hex
        self._meeting_place: TCPStore | None = None
        self._rank, self._size = 0, 1
        self._end = _do_nothing

    def __getattr__(self, name: str) -> Any:
        if name == "_submitter":
            raise InvalidRequest("process group", "has no ranks yet; call configure first")
        raise AttributeError(name)

    def configure(
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: Sequence[int] | None = None,
    ) -> None:
        """Leave the ranks of before, and meet those of now at a store, "host:port/prefix"; prefixes differ each time.

        Only the store, the rank and the size have a meaning here. Blocks until all ranks have called, up to the
        timeout; raises `RendezvousError` naming the missing ones."""
        self.abort()
        address, _, prefix = store_addr.partition("/")
        host, port = split_address(address)
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=self._timeout)
        job = JobEnvironment.read()
        secret = None if job is None else job.secret
        at = StoreRendezvous(PrefixStore(prefix, store), rank, world_size, secret=secret, timeout=self._timeout)
        # The files would be of one generation only.
        config = replace(Config.from_environment(), timeline=None, autotune=False)
        self._join(at, replace(config, start_timeout=self._timeout, collective_timeout=self._timeout))

    def set_rank_info(
        self, replica_id: str, group_rank: int, group_world_size: int, global_rank: int | None = None
    ) -> None:
        """Do nothing: torchft's numbers are for its records of NCCL."""

    def get_reconfigure_handle(self) -> str:
        """Return the text by which the other ranks know this one, with the address of a store in this process."""
        if self._meeting_place is None:
            self._meeting_place = TCPStore(socket.gethostname(), 0, is_master=True, wait_for_workers=False)
        store = join_address(socket.gethostname(), self._meeting_place.port)
        return json.dumps({"id": self._id, "store": store})

    def reconfigure(self, opts: Reconfiguring) -> Work:
        """Do as `configure`, at the store of the first of the ranks' handles; their order is that of the ranks."""
        if not isinstance(opts.handles, list):
            raise ConfigError("handles", f"must be a list in the order of the ranks, got {type(opts.handles).__name__}")
        ranks = [json.loads(handle) for handle in opts.handles]
        place = [each["id"] for each in ranks].index(self._id)
        self.configure(f"{ranks[0]['store']}/farandole/{opts.uuid}", "", place, len(ranks))
        return Work([], None, Follower("farandole-futures"))

    def errored(self) -> Exception | None:
        """Return the error that every operation raises until the group is configured again; None if there is none.

        A rank that has left by `abort` or `shutdown` is no error of the group: the operations that it lacks tell."""
        if "_context" not in self.__dict__:
            return None
        try:
            context = self._context()
            if context is None:
                return EngineClosed("it was shut down")
            context.engine.require_alive()
        except FarandoleError as error:
            return error
        return None

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of the next `configure`, and of the operations after it."""
        self._timeout = timeout

    def allreduce(  # type: ignore[override]
        self, tensors: Sequence[torch.Tensor], opts: Any = None
    ) -> Work:
        """Reduce the tensor in place; `opts` may also be a `ReduceOp`."""
        if not isinstance(opts, dist.AllreduceOptions | None):
            op, opts = opts, dist.AllreduceOptions()
            opts.reduceOp = op
        return super().allreduce(tensors, opts)

    def broadcast_one(self, tensor: torch.Tensor, root: int) -> Work:
        """Overwrite the tensor with the root's."""
        opts = dist.BroadcastOptions()
        opts.rootRank = root
        return self.broadcast([tensor], opts)

    def rank(self) -> int:
        """Return this rank's number."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self._size


def _do_nothing() -> None:
    """Leave no ranks: there are none yet."""
