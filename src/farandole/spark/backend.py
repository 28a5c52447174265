"""Public names of `farandole.estimators.backend`."""

from farandole.estimators.backend import Backend, SparkBackend, default_num_proc

__all__ = ["Backend", "SparkBackend", "default_num_proc"]
