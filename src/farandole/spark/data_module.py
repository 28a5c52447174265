"""Public names of `farandole.estimators.data_module`."""

from farandole.estimators.data_module import DataModule, PetastormDataModule

__all__ = ["DataModule", "PetastormDataModule"]
