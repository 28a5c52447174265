"""Entry point that `import torch` calls (see pyproject.toml), so that torch.distributed knows the backend "farandole".

TORCH_DEVICE_BACKEND_AUTOLOAD=0 is torch's switch against that; `import farandole.torch.distributed` does the same."""

import torch.distributed as dist

__all__ = ["register"]


def register() -> None:
    """Let `init_process_group` know the backend; what it is made of is imported when the first group is made."""
    if dist.is_available():
        dist.Backend.register_backend("farandole", _make_group, extended_api=True, devices=["cpu"])


def _make_group(asked: object, options: object = None) -> dist.ProcessGroup:
    from farandole.torch.distributed.backend import make_group

    return make_group(asked, options)
