"""Public names of `farandole.estimators.torch`."""

from farandole.estimators.torch import TorchEstimator, TorchModel

__all__ = ["TorchEstimator", "TorchModel"]
