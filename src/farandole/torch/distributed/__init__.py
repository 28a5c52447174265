"""farandole as a backend of torch.distributed: DDP, FSDP and what stands on them run over its collectives unchanged.

torch.distributed.init_process_group(backend="farandole")

`import torch` has told torch of it already; importing this does so where TORCH_DEVICE_BACKEND_AUTOLOAD is 0."""

from farandole.torch.distributed.backend import register
from farandole.torch.distributed.group import FarandoleGroup

__all__ = ["FarandoleGroup", "register"]

register()
