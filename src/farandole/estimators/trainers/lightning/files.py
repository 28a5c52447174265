"""Files and weights that a Lightning trainer's callbacks write."""

import io
from collections.abc import Collection
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import torch
from torch import Tensor

from farandole.errors import ConfigError
from farandole.estimators.trainers.torch.devices import on_cpu


class LightningState(TypedDict):
    """Lightning's own checkpoint; it has further entries."""

    state_dict: dict[str, Tensor]
    callbacks: NotRequired[dict[str, Any]]
    lr_schedulers: NotRequired[list[dict[str, Any]]]
    optimizer_states: NotRequired[list[dict[str, Any]]]


class Saved(TypedDict):
    """The framework's state in a checkpoint of a run."""

    lightning: LightningState
    best: dict[str, Tensor] | None  # weights of the user's `ModelCheckpoint`
    prefix: str  # of the weights' names, which the user's own model does not have
    folder: NotRequired[str]  # of the callbacks' files


class BestWeights:
    """The best weights of a `ModelCheckpoint`. Those of an earlier attempt come from the run's checkpoint."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] | None = None
        self._seen: tuple[str, int] | None = None

    def look(self, callbacks: tuple[object, ...], written: Collection[str]) -> None:
        """Read the best file of the first `ModelCheckpoint` if this rank has written it since the last call."""
        path = next((each.best_model_path for each in callbacks if hasattr(each, "best_model_path")), "")
        if path not in written or not Path(path).is_file():
            return
        seen = path, Path(path).stat().st_mtime_ns
        if seen != self._seen:
            self._seen = seen
            # Unpickles, as the file may hold objects of the user's module. A file of an earlier attempt, which could
            # run foreign code, is not read.
            self.weights = torch.load(path, map_location="cpu", weights_only=False)["state_dict"]


def dumped(values: Saved, *, checked: bool = False) -> bytes:
    """Return `values` as a file's content, with tensors on the CPU, so that machines without GPUs can load it.

    With `checked` it raises `ConfigError` for values that cannot be loaded without running code."""
    file = io.BytesIO()
    torch.save(on_cpu(values), file)
    content = file.getvalue()
    if checked:
        try:
            loaded(content)
        except Exception as error:
            raise ConfigError(
                "callbacks",
                "a checkpoint may hold tensors and plain values only; look at on_save_checkpoint, and at state_dict of "
                f"callbacks and schedulers: {str(error).splitlines()[0]}",
            ) from error
    return content


def loaded(content: bytes) -> Saved:
    """Read the result of `dumped`. It loads only tensors and plain values, so a foreign file runs no code."""
    values: Saved = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return values


def weights_of(state: bytes) -> dict[str, Tensor]:
    """Return the weights of the fitted model in a checkpoint's state."""
    saved = loaded(state)
    weights = saved["lightning"]["state_dict"] if saved["best"] is None else saved["best"]
    return {name.removeprefix(saved["prefix"]): value for name, value in weights.items()}


def moved(value: Any, old: str, new: str) -> Any:
    """Return a callback's state with `new` in place of the folder `old` in its paths."""
    if isinstance(value, dict):
        return {moved(name, old, new): moved(each, old, new) for name, each in value.items()}
    if isinstance(value, str) and (value == old or value.startswith(f"{old}/")):
        return new + value.removeprefix(old)
    return value
