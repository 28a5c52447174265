"""Interface of fabrics: libraries that carry a job's tensors in place of farandole's own sockets and shared memory."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Self

from farandole._native import Fabric as NativeFabric
from farandole.config import Config
from farandole.meeting.frames import Deadline
from farandole.meeting.rendezvous import Rendezvous


class Fabric(ABC):
    """A fabric that this rank can use. It knows how ranks connect; `choice.py` knows whether they do.

    `address` tells the other ranks which of the fabric's ends this rank is. `reason` names the device because of which
    the rank offers the fabric unasked. Its text names the library for the log."""

    name: ClassVar[str]  # the value of the setting `fabric` that asks for it
    address: str
    reason: str = ""

    @classmethod
    @abstractmethod
    def requested(cls, config: Config, deadline: Deadline) -> Self:
        """Prepare the fabric because the setting asks for it. Blocks up to `deadline`; raises `ConfigError`."""

    @classmethod
    @abstractmethod
    def found(cls, rendezvous: Rendezvous, config: Config, deadline: Deadline) -> Self | str:
        """Prepare the fabric if it is better here than farandole's own transport, or else return the obstacle.

        "" without a device for which the fabric is made, so that nobody expects it. Blocks up to `deadline`."""

    @abstractmethod
    def connect(self, addresses: Sequence[str], deadline: Deadline) -> NativeFabric:
        """Connect the ranks, rank r being at `addresses[r]`. Blocks until all have called, up to `deadline`.

        Raises `ConfigError` if the ranks cannot reach each other this way, and `RendezvousError` if they fail to."""
