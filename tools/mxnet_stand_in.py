"""Stand-in for MXNet, with which tools can import `farandole.mxnet`: other frameworks refuse MXNet's NumPy."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


class StandIn(ModuleType):
    """Module in which each name is there: a class if it begins with a capital, else another such module."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        whole = f"{self.__name__}.{name}"
        made = type(name, (), {"__module__": self.__name__}) if name[0].isupper() else StandIn(whole)
        setattr(self, name, made)
        return made


@contextmanager
def mxnet_stand_in() -> Iterator[None]:
    """Give Python a stand-in for MXNet within the block, unless MXNet is installed."""
    if find_spec("mxnet") is not None:
        yield
        return
    whole = StandIn("mxnet")
    sys.modules.update({"mxnet": whole, "mxnet.base": StandIn("mxnet.base")})
    try:
        yield
    finally:
        import farandole

        for name in [name for name in sys.modules if name.startswith(("mxnet", "farandole.mxnet"))]:
            del sys.modules[name]
        vars(farandole).pop("mxnet", None)
