"""Checkpoint of a run, written after each epoch and read when a fit with the same run id starts."""

import hashlib
import io
import json
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Self

from farandole.errors import ConfigError, FarandoleError, SourceError
from farandole.estimators.store import FilesystemStore
from farandole.estimators.trainers.report import Record

_FACTS, _STATE, _FINAL = "run.json", "state", "final"
_MARK, _ZIP = b"farandole checkpoint, SHA-256 ", b"PK"
_HEAD = len(_MARK) + hashlib.sha256().digest_size * 2 + 1  # bytes before the zip


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The state after `epoch` finished epochs: a zip of JSON and the framework's own state. Loading it runs no code.

    A line with the zip's checksum precedes it. The checkpoint does not hold random generators: each epoch seeds them
    anew from `seed`, its number and the rank.
    """

    kind: str = ""  # of the estimator; other kinds cannot read the state
    epoch: int = 0
    step: int = 0
    seed: int
    # Weights and optimizer, as the trainer wrote them. The learning rate is the user's, not yet multiplied by the
    # number of ranks. So it is multiplied once, however often the run is resumed and on any number of ranks.
    state: bytes | None = None  # None only before the first epoch, which no file holds
    final: bytes | None = None  # the fitted model's weights, if the end of the training has changed those of `state`
    history: list[Record] = field(default_factory=list)
    best: Record | None = None  # the epoch of the smallest validation loss
    outputs: list[tuple[str, list[int]]] | None = None  # type and shape of one row of each output
    stopped: bool = False  # a callback ended the training before its last epoch

    @property
    def weights(self) -> bytes:
        """The state with the weights of the fitted model."""
        found = self.final or self.state
        assert found is not None, "an epoch is finished"
        return found

    def dump(self) -> bytes:
        """Return the file's content."""
        assert self.state is not None
        facts = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in (_STATE, _FINAL)}
        file = io.BytesIO(bytes(_HEAD))
        file.seek(_HEAD)
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr(_FACTS, json.dumps(facts))
            archive.writestr(_STATE, self.state)
            if self.final is not None:
                archive.writestr(_FINAL, self.final)
        with file.getbuffer() as whole:
            whole[:_HEAD] = _head(whole[_HEAD:])
        return file.getvalue()

    @classmethod
    def load(cls, content: bytes, path: str = "checkpoint") -> Self:
        """Read the result of `dump`, the content of `path`, without running code in it.

        Raises `SourceError` for content that has changed or is of another kind of file."""
        # Earlier versions wrote the zip alone, whose members have checksums of their own.
        whole = content.startswith(_ZIP) or content[:_HEAD] == _head(memoryview(content)[_HEAD:])
        if not whole:
            raise SourceError(path, "is damaged or cut off, or not a checkpoint of farandole's estimators")
        try:
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                facts = json.loads(archive.read(_FACTS))
                state = archive.read(_STATE)
                final = archive.read(_FINAL) if _FINAL in archive.namelist() else None
            outputs = facts.pop("outputs")
            outputs = None if outputs is None else [(dtype, shape) for dtype, shape in outputs]
            return cls(state=state, final=final, outputs=outputs, **facts)
        except (zipfile.BadZipFile, EOFError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise SourceError(path, f"is no checkpoint that this version of farandole reads ({error})") from error


def digest(state: bytes) -> bytes:
    """Return a digest of a trainer's state; of a zip, as NumPy and torch write, without the times in it."""
    file, made = io.BytesIO(state), hashlib.sha256()
    if not zipfile.is_zipfile(file):
        return hashlib.sha256(state).digest()
    with zipfile.ZipFile(file) as archive:
        for name in archive.namelist():
            made.update(name.encode() + hashlib.sha256(archive.read(name)).digest())
    return made.digest()


def write_checkpoint(store: FilesystemStore, run_id: str, content: bytes) -> None:
    """Write a run's newest checkpoint; keep the one before it."""
    store.write(store.get_checkpoint_path(run_id), content, former=store.get_former_checkpoint_path(run_id))


def last_checkpoint(store: FilesystemStore, run_id: str, warn: Callable[[str], object]) -> Checkpoint | None:
    """Return the newest intact checkpoint of a run; None for a new run.

    A damaged or missing newest file is replaced by the one before it, after a call of `warn` with a text that names
    both. Raises `SourceError` if the run has a damaged checkpoint and no intact one."""
    problems: list[str] = []
    damaged: SourceError | None = None
    newest = store.get_checkpoint_path(run_id)
    for path in (newest, store.get_former_checkpoint_path(run_id)):
        content = store.read(path)
        if content is None:
            problems.append(f"{path} is missing")
            continue
        try:
            found = Checkpoint.load(content, path)
        except SourceError as error:
            problems.append(str(error))
            damaged = damaged or error
            continue
        if problems:
            warn(f"{'; '.join(problems)}: the run continues after epoch {found.epoch}, which {path} holds")
            store.write(newest, content)  # else the next epoch would keep the damaged file in place of this one
        return found
    if damaged is not None:
        remedy = f"remove {store.get_run_path(run_id)} to start the run again, or set another run_id"
        raise SourceError(damaged.path, f"{damaged.problem}, and there is no intact one before it: {remedy}")
    return None


@contextmanager
def restoring(store: FilesystemStore | None, run_id: str) -> Iterator[None]:
    """Raise `ConfigError`, which names the run, in place of a framework's error while its state is loaded."""
    try:
        yield
    except FarandoleError:
        raise
    except Exception as error:
        where = "" if store is None else f" in {store.get_run_path(run_id)}"
        remedy = "set another run_id, or remove the folder of this run"
        problem = f"the checkpoint of {run_id!r}{where} is of another model or optimizer: {remedy}"
        raise ConfigError("run_id", f"{problem} ({' '.join(str(error).split())})") from error


def _head(archive: "bytes | memoryview") -> bytes:
    return _MARK + hashlib.sha256(archive).hexdigest().encode() + b"\n"
