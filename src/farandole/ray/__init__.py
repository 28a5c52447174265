"""Ranks in a Ray cluster: `RayExecutor` and `ElasticRayExecutor`, with the arguments of Horovod's classes."""

from farandole.extras import importing as _importing

with _importing(__name__):
    from farandole.ray.elastic import ElasticRayExecutor, ElasticSettings, RayHostDiscovery
    from farandole.ray.executor import RayExecutor, Settings

__all__ = ["ElasticRayExecutor", "ElasticSettings", "RayExecutor", "RayHostDiscovery", "Settings"]
