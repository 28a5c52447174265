"""Backend of torch.distributed: DDP, FSDP and libraries on top of them run over farandole's collectives unchanged.

torch.distributed.init_process_group(backend="farandole")

`import torch` has registered it already, except with TORCH_DEVICE_BACKEND_AUTOLOAD=0; then import this package."""

from farandole.torch.distributed.backend import register
from farandole.torch.distributed.group import FarandoleGroup

__all__ = ["FarandoleGroup", "register"]

register()
