"""Public names of `farandole.estimators.lightning`."""

from farandole.estimators.lightning import LightningEstimator, LightningModel

__all__ = ["LightningEstimator", "LightningModel"]
