"""Strategy for the package `lightning`."""

import lightning.pytorch as package

from farandole.lightning.ranks import strategy_class

FarandoleStrategy = strategy_class(package)
