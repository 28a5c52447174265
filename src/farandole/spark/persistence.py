"""Class that estimators saved before version 0.2 hold."""

from farandole.estimators.persistence import _SavedProfile

__all__ = ["_SavedProfile"]
