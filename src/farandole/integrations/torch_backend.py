"""Entry point that `import torch` calls (see pyproject.toml) to register the backend "farandole", and its `env://`.

TORCH_DEVICE_BACKEND_AUTOLOAD=0 switches this off; `import farandole.torch.distributed` then registers it."""

import functools
import inspect
import logging
import os
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch._C._distributed_c10d import _DistributedBackendOptions

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger(__name__)


def register() -> None:
    """Register the backend with `init_process_group`; its modules are imported when the first group is made.

    Never raises, because `import torch` would fail: the registration's error is logged, at level INFO."""
    if not dist.is_available():
        return
    try:
        dist.Backend.register_backend("farandole", _make_group, extended_api=True, devices=["cpu", "cuda"])
        # Imported here, so that no error in it ends `import torch`.
        from farandole.torch_env import find_stores_of_jobs

        find_stores_of_jobs()
        if os.environ.get("FARANDOLE_AS_GLOO", "").strip().lower() not in ("", "0", "false", "no", "off"):
            _stand_in_for_gloo()
    except Exception as error:
        log.info('the backend "farandole" cannot be registered with torch %s: %r', torch.__version__, error)


def _make_group(asked: "_DistributedBackendOptions", options: object = None) -> dist.ProcessGroup:
    group: dist.ProcessGroup = _groups().make_group(asked, options)
    return group


def _groups() -> ModuleType:
    """Return the module of our groups."""
    try:
        # Imported here: `import torch` calls `register` of this module, and few of its programs make such a group.
        from farandole.torch.distributed import gloo
    except ImportError as error:
        raise ImportError(
            f'the backend "farandole" cannot be loaded with torch {torch.__version__}: {error}. Install farandole '
            'anew, with torch 2.10 or later (pip install --force-reinstall "farandole[torch]"), or use backend="gloo", '
            "without FARANDOLE_AS_GLOO",
            name=error.name,
            path=error.path,
        ) from error
    return gloo


def _stand_in_for_gloo() -> None:
    """Let torch make our groups where a program asks for gloo's, which keep gloo's name."""
    from torch.distributed import distributed_c10d  # the function is not public, so it may be absent

    module = vars(distributed_c10d)
    module["_new_process_group_helper"] = _with_ours(module["_new_process_group_helper"], module)


def _with_ours(make: Callable[P, T], module: dict[str, object]) -> Callable[P, T]:
    @functools.wraps(make)
    def make_ours(*args: P.args, **kwargs: P.kwargs) -> T:
        asked, gloo = inspect.signature(make).bind(*args, **kwargs).arguments, module["ProcessGroupGloo"]
        module["ProcessGroupGloo"] = _groups().class_for(asked["group_name"], asked["global_ranks_in_group"])
        try:
            return make(*args, **kwargs)
        finally:
            module["ProcessGroupGloo"] = gloo

    return make_ours
