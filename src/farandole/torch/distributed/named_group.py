"""Names of a process group, as torch's Python and C++ ask for them."""

from typing import NoReturn, Self

import torch
import torch.distributed as dist

from farandole.errors import InvalidRequest

__all__ = ["NamedGroup"]


class NamedGroup(dist.ProcessGroup):
    """A group with torch's name for it, and a label for errors; C++ uses names of methods in its own style."""

    title = "farandole"  # of its operations in torch's profiler
    # Attributes of torch's backends.
    supports_coalescing = supports_splitting = supports_shrinking = False
    supports_tensor_alloc = supports_time_estimate = False

    def __init__(self, rank: int, size: int, name: str, label: str) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # an overload of torch's stub
        self._name, self._label = name, label

    @property
    def group_name(self) -> str:  # type: ignore[override]  # torch's NewType of str
        """The name by which torch's functional collectives find the group."""
        return self._name

    @property
    def group_desc(self) -> str:
        """The group's name in errors; empty for the group of all ranks."""
        return self._label

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices whose tensors it takes; checkpoints look for the CPU among them.

        None while torch makes the group: torch 2.15 adds its flight recorder to each new group that has devices, and
        the recorder needs a backend of C++."""
        made = self in dist.distributed_c10d._world.pg_map
        return [torch.device("cpu"), torch.device("cuda")] if made else []

    def getGroupName(self) -> str:
        """Return `group_name`."""
        return self._name

    def getGroupDesc(self) -> str:
        """Return `group_desc`."""
        return self._label

    def setGroupName(self, name: str) -> None:
        """Set torch's name of the group."""
        self._name = name

    def setGroupDesc(self, description: str) -> None:
        """Keep the label, which is more precise."""

    def getBackendName(self) -> str:
        """Return the name for `init_process_group`."""
        return "farandole"

    def _get_backend(self, device: torch.device) -> Self:  # type: ignore[override]  # torch has groups and backends
        """Return this group, in which each device's operations are its own."""
        return self

    get_backend = _get_backend  # torch 2.15 asks by this name, too

    def split_group(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise `InvalidRequest`: torch's own method crashes without a backend of C++."""
        raise InvalidRequest("split_group", "only torch's own process groups can be split; use new_group")

    def merge_remote_group(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise `InvalidRequest`: torch's own method returns None without a backend of C++."""
        raise InvalidRequest("merge_remote_group", "only torch's own process groups can be merged; use new_group")
