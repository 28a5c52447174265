"""Process groups of farandole under gloo's name."""

import logging
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace

from torch._C._distributed_c10d import Store, _DistributedBackendOptions

from farandole.errors import ConfigError
from farandole.torch.distributed.backend import arguments_of, make_group
from farandole.torch.distributed.group import FarandoleGroup

__all__ = ["GlooGroup", "class_for", "make_group"]

log = logging.getLogger(__name__)


class GlooGroup(FarandoleGroup):
    """A group that torch makes like one of `ProcessGroupGloo`, of the ranks `members`; empty: of all ranks."""

    title = "gloo"
    members: Sequence[int] = ()
    label = ""

    def __init__(
        self, store: Store, rank: int, size: int, timeout: timedelta, enable_reconfigure: bool = False
    ) -> None:
        if enable_reconfigure:  # torch 2.15 passes it
            raise ConfigError("enable_reconfigure", "only gloo itself has it; unset FARANDOLE_AS_GLOO")
        asked = _DistributedBackendOptions()
        asked.store, asked.group_rank, asked.group_size, asked.timeout = store, rank, size, timeout
        asked.group_id, asked.global_ranks_in_group = self.label, list(self.members)
        super().__init__(**arguments_of(asked))
        self.options = SimpleNamespace()  # torch stores the members and the name there
        if rank == 0 and not self.members:
            log.warning("process groups of gloo are farandole's, because FARANDOLE_AS_GLOO is set")

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: torch's numbers are for its checks of gloo."""


def class_for(name: str, members: Sequence[int]) -> type[GlooGroup]:
    """Return the class for one group, in place of `ProcessGroupGloo`, whose constructor gets neither of the two."""
    return type("GlooGroup", (GlooGroup,), {"label": name, "members": members})
