"""Entry point that `import torch` calls (see pyproject.toml) to register the backend "farandole".

TORCH_DEVICE_BACKEND_AUTOLOAD=0 switches this off; `import farandole.torch.distributed` then registers it."""

import torch.distributed as dist

__all__ = ["register"]


def register() -> None:
    """Register the backend with `init_process_group`; its modules are imported when the first group is made."""
    if dist.is_available():
        dist.Backend.register_backend("farandole", _make_group, extended_api=True, devices=["cpu", "cuda"])


def _make_group(asked: object, options: object = None) -> dist.ProcessGroup:
    from farandole.torch.distributed.backend import make_group

    return make_group(asked, options)
