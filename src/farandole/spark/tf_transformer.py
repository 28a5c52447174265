"""Public names of `farandole.estimators.tf_transformer`."""

from farandole.estimators.tf_transformer import TFInputGraph, TFTransformer

__all__ = ["TFInputGraph", "TFTransformer"]
