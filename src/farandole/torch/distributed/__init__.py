"""farandole as a backend of torch.distributed: DDP, FSDP and what stands on them run over its collectives unchanged.

import farandole.torch.distributed
torch.distributed.init_process_group(backend="farandole")
"""

from farandole.torch.distributed.backend import register
from farandole.torch.distributed.group import FarandoleGroup

__all__ = ["FarandoleGroup", "register"]

register()
