"""The backend's name in accelerate, with a stand-in for accelerate that chooses as accelerate 1.15 does."""

import sys
from types import ModuleType

import pytest

from farandole.integrations.accelerate import accept_backend


class PartialState:
    def _prepare_backend(
        self, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
    ) -> tuple[str | None, str]:
        if not cpu:
            return backend, "NO"
        return "mpi" if backend == "mpi" else "gloo", "MULTI_CPU"


def test_the_name_is_kept_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("accelerate.state")
    vars(module)["PartialState"] = type("PartialState", (PartialState,), dict(vars(PartialState)))
    monkeypatch.setitem(sys.modules, "accelerate", ModuleType("accelerate"))
    monkeypatch.setitem(sys.modules, "accelerate.state", module)
    accept_backend()
    once = module.PartialState._prepare_backend
    accept_backend()
    assert module.PartialState._prepare_backend is once
    state = module.PartialState()
    assert state._prepare_backend(True, backend="farandole") == ("farandole", "MULTI_CPU")
    assert state._prepare_backend(True, False, None) == ("gloo", "MULTI_CPU")
    assert state._prepare_backend(True, False, "mpi") == ("mpi", "MULTI_CPU")
    assert state._prepare_backend(False, False, "nccl") == ("nccl", "NO")
