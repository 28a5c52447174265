"""The backend's name in Hugging Face's accelerate, and so in Trainer, on CPUs: `ddp_backend="farandole"`."""

import functools
import importlib
from typing import Protocol

__all__ = ["accept_backend"]


class _Prepare(Protocol):
    """accelerate's method that chooses the backend and the kind of job."""

    def __call__(
        self, state: object, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
    ) -> tuple[str | None, object]: ...


def accept_backend() -> None:
    """Let accelerate take the backend "farandole" in this process. May be called again.

    On CPUs accelerate takes gloo in place of any other backend but MPI, and then refuses the one that was asked for, so
    this replaces its method that chooses. Raises `ModuleNotFoundError` where accelerate is not installed."""
    state = importlib.import_module("accelerate.state").PartialState
    prepare: _Prepare = state._prepare_backend
    if not hasattr(prepare, "__wrapped__"):
        state._prepare_backend = _with_ours(prepare)


def _with_ours(prepare: _Prepare) -> _Prepare:
    @functools.wraps(prepare)
    def chosen(
        state: object, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
    ) -> tuple[str | None, object]:
        found, kind = prepare(state, cpu, sagemaker_dp, backend)
        return backend if (found, backend) == ("gloo", "farandole") else found, kind

    return chosen
