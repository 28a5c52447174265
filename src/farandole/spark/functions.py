"""Public names of `farandole.estimators.functions`."""

from farandole.estimators.functions import argmax, sigmoid, softmax

__all__ = ["argmax", "sigmoid", "softmax"]
