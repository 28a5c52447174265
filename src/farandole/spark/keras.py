"""Public names of `farandole.estimators.keras`."""

from farandole.estimators.keras import KerasEstimator, KerasModel

__all__ = ["KerasEstimator", "KerasModel"]
