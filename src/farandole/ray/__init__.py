"""Ranks as actors of a Ray cluster: `RayExecutor`, with the arguments of Horovod's class of that name."""

from farandole.extras import importing as _importing

with _importing(__name__):
    from farandole.ray.executor import RayExecutor, Settings

__all__ = ["RayExecutor", "Settings"]
