"""Files and weights that the callbacks of a Lightning trainer write."""

import io
import posixpath
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from farandole.errors import ConfigError
from farandole.spark.store import FilesystemStore
from farandole.spark.trainers.torch_devices import on_cpu

__all__ = ["BestWeights", "dumped", "loaded", "moved", "upload", "weights_of"]


class BestWeights:
    """The weights that a `ModelCheckpoint` calls the best. Those of an earlier attempt come from the checkpoint."""

    def __init__(self) -> None:
        self.weights: dict[str, Any] | None = None
        self._seen: tuple[str, int] | None = None

    def look(self, callbacks: tuple[Any, ...], written: Collection[str]) -> None:
        """Read the file of the first `ModelCheckpoint` if it is a new one among those that this rank has written."""
        path = next((each.best_model_path for each in callbacks if hasattr(each, "best_model_path")), "")
        if path not in written or not Path(path).is_file():
            return
        seen = path, Path(path).stat().st_mtime_ns
        if seen != self._seen:
            self._seen = seen
            # The file may hold objects of the user's module. A file of an earlier attempt could run foreign code.
            self.weights = torch.load(path, map_location="cpu", weights_only=False)["state_dict"]


def dumped(values: Mapping[str, Any], *, checked: bool = False) -> bytes:
    """Return a file's content, for any machine, with GPUs or without.

    With `checked` raise `ConfigError` for values that only code could load."""
    file = io.BytesIO()
    torch.save(on_cpu(dict(values)), file)
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


def loaded(content: bytes) -> dict[str, Any]:
    """Read what `dumped` gave. Loads tensors and plain values only: a foreign file runs no code."""
    values: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return values


def weights_of(state: bytes) -> dict[str, Any]:
    """Return the weights of the fitted model in a checkpoint's state."""
    saved = loaded(state)
    best: dict[str, Any] | None = saved["best"]
    weights: dict[str, Any] = saved["lightning"]["state_dict"] if best is None else best
    prefix: str = saved["prefix"]
    return {name.removeprefix(prefix): value for name, value in weights.items()}


def moved(value: Any, old: str, new: str) -> Any:
    """Return a callback's state with the paths below `old` below `new`."""
    if isinstance(value, dict):
        return {moved(name, old, new): moved(each, old, new) for name, each in value.items()}
    if isinstance(value, str) and (value == old or value.startswith(f"{old}/")):
        return new + value.removeprefix(old)
    return value


def upload(store: FilesystemStore, folder: Path, path: str, copied: dict[Path, int]) -> None:
    """Copy the files in a local folder, and in the folders below it, to `path`.

    `copied` has the time at which each copied file was written: files that have not changed since are left out."""
    for each in folder.rglob("*"):
        if each.is_file() and copied.get(each) != (written := each.stat().st_mtime_ns):
            copied[each] = written
            store.write(posixpath.join(path, each.relative_to(folder).as_posix()), each.read_bytes())
