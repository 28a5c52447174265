"""Exemption of classes from torch.compile."""

from types import FunctionType
from typing import TypeVar

# `torch.compiler.disable` would import the compiler with this module, and take time at each call.
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

__all__ = ["run_as_written"]

Class = TypeVar("Class", bound=type)


def run_as_written(cls: Class) -> Class:
    """Let torch.compile run the methods of `cls` and all that they call as they are, without compiling them.

    A compiled program calls them between its graphs, where the compiler would take each one for a program."""
    strategy = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    for method in vars(cls).values():
        function = method.fget if isinstance(method, property) else method
        if isinstance(function, FunctionType):
            set_code_exec_strategy(function.__code__, strategy)
    return cls
