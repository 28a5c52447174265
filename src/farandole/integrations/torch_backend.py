"""Entry point that `import torch` calls (see pyproject.toml) to register the backend "farandole".

TORCH_DEVICE_BACKEND_AUTOLOAD=0 switches this off; `import farandole.torch.distributed` then registers it."""

import logging

import torch
import torch.distributed as dist

__all__ = ["register"]

log = logging.getLogger(__name__)


def register() -> None:
    """Register the backend with `init_process_group`; its modules are imported when the first group is made.

    Never raises, because `import torch` would fail: the registration's error is logged, at level INFO."""
    if not dist.is_available():
        return
    try:
        dist.Backend.register_backend("farandole", _make_group, extended_api=True, devices=["cpu", "cuda"])
    except Exception as error:
        log.info('the backend "farandole" cannot be registered with torch %s: %r', torch.__version__, error)


def _make_group(asked: object, options: object = None) -> dist.ProcessGroup:
    try:
        from farandole.torch.distributed.backend import make_group
    except ImportError as error:
        raise ImportError(
            f'the backend "farandole" cannot be loaded with torch {torch.__version__}: {error}. Install farandole '
            'anew, with torch 2.10 or later (pip install --force-reinstall "farandole[torch]"), or use backend="gloo"',
            name=error.name,
            path=error.path,
        ) from error
    return make_group(asked, options)
