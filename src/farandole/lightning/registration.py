"""Names of the strategy in Lightning's registry: `Trainer(strategy="farandole")`."""

import functools
import importlib
import importlib.util

from farandole.lightning.packages import PACKAGES

# By the strategy's name: its arguments. "horovod" multiplies the learning rates, as that strategy of Lightning 1 did.
_NAMES: dict[str, dict[str, None]] = {"farandole": {}, "horovod": {"rate_factor": None}}


def register_names() -> None:
    """Register the names with each package of Lightning that is installed, and import it: programs may do so later.

    The second package takes a fraction of a second, as both import torch and torchmetrics."""
    for package in (name for name in PACKAGES if importlib.util.find_spec(name.partition(".")[0])):
        registry = importlib.import_module(package).strategies.StrategyRegistry
        for name in _NAMES.keys() - registry.keys():
            registry.register(name, functools.partial(_made, package), "ranks of a farandole job", **_NAMES[name])


def _made(package: str, **options: object) -> object:
    # Imported here: the module imports torch and torchmetrics, and users may name the strategy without using it.
    from farandole.lightning.ranks import strategy_class

    return strategy_class(importlib.import_module(package))(**options)
