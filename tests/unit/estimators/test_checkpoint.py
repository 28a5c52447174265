"""Checkpoints of runs and the lock of a run, with a small trainer on one rank in this process."""

import errno
import importlib.util
import json
import logging
import os
import subprocess
import sys
import threading
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")
if importlib.util.find_spec("farandole._native") is None:
    pytest.skip("the native core is not built", allow_module_level=True)

from farandole.errors import ConfigError, SourceError
from farandole.estimators import run_lock
from farandole.estimators.run_lock import RunLock, require_owner
from farandole.estimators.store import FilesystemStore, LocalStore, Store
from farandole.estimators.trainers import run as running
from farandole.estimators.trainers.checkpoint import Checkpoint, last_checkpoint
from farandole.estimators.trainers.rows import RowsWanted
from farandole.estimators.trainers.run import Run, RunPlan
from farandole.event_file import EventFile
from helpers.estimator_rows import points, shard_of


class Counting:
    """A trainer whose state is a number of epochs; `width` stands for the shape of its model."""

    def __init__(self, run: Run, width: int = 1) -> None:
        self.count, self.width = 0, width

    def restore(self, state: bytes) -> None:
        saved = json.loads(state)
        if saved["width"] != self.width:
            raise RuntimeError(f"size mismatch for weight:\n\t{saved['width']} in the checkpoint, {self.width} here")
        self.count = saved["count"]

    def train(self, run: Run) -> None:
        for epoch in run.epochs:
            self.count += 1
            run.finish(epoch, {"loss": 0.5, "seconds": 1.0, "rows_per_s": 1.0, "waited": 0.0}, None)

    def state(self, *, whole: bool) -> bytes:
        return json.dumps({"count": self.count, "width": self.width}).encode()


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> FilesystemStore:
    return Store.create(str(tmp_path / "store") if request.param == "local" else f"memory://{uuid.uuid4().hex}")


def trained(store: FilesystemStore, folder: Path, epochs: int, *, width: int = 1, **changes: Any) -> int:
    """Train up to `epochs` epochs; return how many epochs the trainer's state has counted."""
    columns = points(4)
    rows = RowsWanted(
        columns=tuple(columns), validation=None, validation_col=None, batch_size=4, val_batch_size=4, shuffle=False
    )
    settings: dict[str, Any] = {
        "run_id": "run", "store": store, "rows": rows, "label_cols": ("y",), "epochs": epochs, "train_steps": None,
        "validation_steps": None, "start": Checkpoint(seed=1), "verbose": 0,
    }  # fmt: skip
    plan = RunPlan(**(settings | changes))
    content = running.train(plan, lambda run: Counting(run, width), shard_of(folder, columns))
    assert content is not None
    state = Checkpoint.load(content).state
    assert state is not None
    count: int = json.loads(state)["count"]
    return count


def changed(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def test_any_changed_byte_of_a_checkpoint_is_noticed(tmp_path: Path) -> None:
    content = Checkpoint(seed=3, epoch=2, state=b"weights").dump()
    assert Checkpoint.load(content).state == b"weights"
    for place in range(len(content)):
        with pytest.raises(SourceError, match="is damaged or cut off"):
            Checkpoint.load(changed(content, place))
    for end in range(0, len(content), 7):
        with pytest.raises(SourceError, match="is damaged or cut off"):
            Checkpoint.load(content[:end])
    alone = content[content.index(b"PK") :]
    assert Checkpoint.load(alone).state == b"weights", "a zip alone, as earlier versions wrote it"
    with pytest.raises(SourceError, match="is no checkpoint that this version of farandole reads"):
        Checkpoint.load(alone.replace(b"state", b"stare"))


def test_a_run_continues_after_the_checkpoint_before_a_damaged_one(
    store: FilesystemStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(running, "log_to_driver", told.append)
    assert trained(store, tmp_path, 3) == 3
    path = store.get_checkpoint_path("run")
    content = store.read(path)
    assert content is not None
    store.write(path, changed(content, content.rindex(b"state")))  # the member's name in the zip's list
    assert trained(store, tmp_path, 5) == 5
    (warning,) = told
    former = store.get_former_checkpoint_path("run")
    assert warning == (
        f"warning: {path}: is damaged or cut off, or not a checkpoint of farandole's estimators: the run continues "
        f"after epoch 2, which {former} holds"
    )
    store.remove(path)
    found = last_checkpoint(store, "run", told.append)
    assert found is not None and found.epoch == 4
    assert told[1].startswith(f"{path} is missing: the run continues after epoch 4, which {former} holds")
    for place in (path, former):
        assert Checkpoint.load(store.read(place) or b"").epoch == 4, "a crash now must leave an intact one"


def test_a_run_without_an_intact_checkpoint_does_not_start_again(store: FilesystemStore, tmp_path: Path) -> None:
    trained(store, tmp_path, 1)
    path = store.get_checkpoint_path("run")
    content = store.read(path)
    assert content is not None
    store.write(path, changed(content, len(content) // 2))
    remedy = (
        rf"{path}: is damaged .*no intact one before it: remove {store.get_run_path('run')} .* or set another run_id"
    )
    with pytest.raises(SourceError, match=remedy):
        trained(store, tmp_path, 2)


def test_a_checkpoint_of_another_model_names_the_run(store: FilesystemStore, tmp_path: Path) -> None:
    trained(store, tmp_path, 1)
    with pytest.raises(
        ConfigError, match=r"run_id: the checkpoint of 'run' in .*/runs/run is of another model .*: set"
    ):
        trained(store, tmp_path, 2, width=2)


def test_an_error_of_a_file_system_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(str(tmp_path))

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/runs/run/checkpoint'"):
        store.write(store.get_checkpoint_path("run"), b"content")
    events = EventFile(tmp_path)
    events._file.close()
    events._file = os.fdopen(os.open("/dev/full", os.O_WRONLY), "wb")
    events.scalars({"loss": 1.0}, 1)
    with pytest.raises(OSError, match=r"No space left on device: '.*/events.out.tfevents.*'"):
        events.flush()
    with pytest.raises(OSError, match="No space left"):
        events.close()


def test_two_fits_do_not_train_one_run(store: FilesystemStore, tmp_path: Path) -> None:
    folder = store.get_run_path("run")
    with RunLock(store, folder):
        here = rf"run_id: the run in {folder} belongs to a fit of process {os.getpid()} on .*, since 20.*: wait for its"
        with pytest.raises(ConfigError, match=here), RunLock(store, folder):
            pass
        with pytest.raises(ConfigError, match="belongs to a fit of process"):
            trained(store, tmp_path, 1, owner="of a fit that has lost the run")
        assert store.read(store.get_checkpoint_path("run")) is None
    with RunLock(store, folder) as owner:
        assert trained(store, tmp_path, 1, owner=owner) == 1
    assert not store.exists(f"{folder}/lock")


def test_a_dead_owner_of_this_machine_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = LocalStore(str(tmp_path))
    program = (
        "import os, sys\nfrom farandole.estimators.run_lock import RunLock\n"
        "from farandole.spark.store import LocalStore\n"
        "RunLock(LocalStore(sys.argv[1]), sys.argv[1]).__enter__(); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=60)
    assert store.exists(f"{tmp_path}/lock")
    with RunLock(store, str(tmp_path)):
        assert "which has ended; this fit goes on" in caplog.text


def elsewhere(store: FilesystemStore, **changes: Any) -> None:
    """Make the owner of the lock of "/run" a process of another machine."""
    content = store.read("/run/lock")
    assert content is not None
    store.write("/run/lock", json.dumps(json.loads(content) | {"machine": "other", "host": "far"} | changes).encode())


def test_an_owner_elsewhere_lives_while_it_renews_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run_lock, "PATIENCE", timedelta(seconds=0.3))
    monkeypatch.setattr(run_lock, "LOOK", timedelta(seconds=0.01))
    store = Store.create(f"memory://{uuid.uuid4().hex}")
    with RunLock(store, "/run"):
        elsewhere(store, token="lost")
    with caplog.at_level(logging.WARNING), RunLock(store, "/run") as owner:
        assert "/run is locked by process" in caplog.text and "on far, since" in caplog.text
        elsewhere(store)
        timer = threading.Timer(0.1, elsewhere, [store], {"beats": 5})
        timer.start()
        with pytest.raises(ConfigError, match=r"on far, since .* which is going on"), RunLock(store, "/run"):
            pass
        timer.join()
        require_owner(store, "/run", owner)


def test_the_owner_renews_the_lock_and_leaves_that_of_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "BEAT", timedelta(seconds=0.01))
    store = Store.create(f"memory://{uuid.uuid4().hex}")
    with RunLock(store, "/run") as owner:
        while b'"beats": 0' in (store.read("/run/lock") or b""):
            threading.Event().wait(0.01)
        lock = store.read("/run/lock")
        assert lock is not None
        store.write("/run/lock", json.dumps(json.loads(lock) | {"token": "other"}).encode())
        with pytest.raises(ConfigError, match="belongs to a fit of"):
            require_owner(store, "/run", owner)
    assert store.exists("/run/lock"), "it is the other one's"
