"""Lightning binding: a strategy that trains a `LightningModule` on the ranks of a farandole job.

    trainer = lightning.Trainer(accelerator="cpu", strategy=FarandoleStrategy())

Importing it registers the strategy with Lightning as "farandole", and as "horovod". `strategy_class` makes the same
strategy for the package `pytorch_lightning`, which has classes of its own."""

import importlib
from typing import TYPE_CHECKING

from farandole.extras import importing as _importing
from farandole.lightning.registration import register_names as _register_names

if TYPE_CHECKING:
    from farandole.lightning.packages import package_of
    from farandole.lightning.ranks import strategy_class
    from farandole.lightning.strategy import FarandoleStrategy

__all__ = ["FarandoleStrategy", "package_of", "strategy_class"]

with _importing(__name__):
    _register_names()

if not TYPE_CHECKING:  # else every name would count as there

    def __getattr__(name: str) -> object:  # PEP 562; each of Lightning's packages takes seconds to import
        homes = {"FarandoleStrategy": "strategy", "package_of": "packages", "strategy_class": "ranks"}
        if name in homes:
            with _importing(__name__):
                return getattr(importlib.import_module(f"{__name__}.{homes[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
