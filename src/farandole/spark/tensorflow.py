"""Public names of `farandole.estimators.tensorflow`."""

from farandole.estimators.tensorflow import HorovodEstimator, TFInputGraph, TFTransformer

__all__ = ["HorovodEstimator", "TFInputGraph", "TFTransformer"]
