"""The two packages of Lightning: `lightning.pytorch` and `pytorch_lightning`, which share no class."""

import sys
from types import ModuleType

# By package: the package with its cluster environments.
FABRICS = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
PACKAGES = tuple(FABRICS)


def package_of(value: object, base: str = "LightningModule") -> ModuleType | None:
    """Return the package whose class `base` the `value` is an instance of; None for other values.

    Imports no package: if there is an instance, its package is imported."""
    for name in PACKAGES:
        package = sys.modules.get(name)
        if package is not None and isinstance(value, getattr(package, base)):
            return package
    return None
