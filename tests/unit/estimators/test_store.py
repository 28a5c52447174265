"""Where runs keep their files, on the local disk and in an object store (fsspec's in-memory one)."""

import copy
import io
import os
import pickle
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("fsspec")

import pyarrow as pa
import pyarrow.parquet as pq

from farandole.errors import ConfigError
from farandole.estimators.store import DBFSLocalStore, FilesystemStore, HDFSStore, LocalStore, Store
from farandole.estimators.trainers.mirror import Mirror
from helpers.hadoop import Hadoop, hadoop_in_memory


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> FilesystemStore:
    return Store.create(str(tmp_path) if request.param == "local" else f"memory://{uuid.uuid4().hex}")


def test_layout(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    assert store.get_checkpoint_path("pytorch_1") == f"{tmp_path}/runs/pytorch_1/checkpoint"
    assert store.get_logs_path("pytorch_1") == f"{tmp_path}/runs/pytorch_1/logs"
    assert store.is_local


def test_what_was_written_is_read_also_by_a_pickled_copy(store: FilesystemStore) -> None:
    path = store.get_checkpoint_path("run")
    assert store.read(path) is None
    store.write(path, b"first")
    store.write(path, b"second")
    assert pickle.loads(pickle.dumps(store)).read(path) == b"second"


def test_a_crash_while_writing_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(str(tmp_path))
    path = store.get_checkpoint_path("run")
    store.write(path, b"old")

    def crash(_: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", crash)
    with pytest.raises(OSError, match="no space"):
        store.write(path, b"new")
    assert store.read(path) == b"old"
    assert [each.name for each in Path(path).parent.iterdir()] == ["checkpoint"]


def test_files_of_a_process_that_was_killed_while_it_wrote_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "checkpoint"
    with monkeypatch.context() as killed, pytest.raises(SystemExit):
        killed.setattr("os.fsync", sys.exit)
        killed.setattr(Path, "unlink", lambda *_, **__: None)
        LocalStore(str(tmp_path)).write(str(path), b"old")
    (left,) = tmp_path.iterdir()
    others = [tmp_path / ".checkpoint.txt", tmp_path / f".checkpoint.best.{uuid.uuid4().hex}"]
    for each in others:
        each.write_bytes(b"")
    LocalStore(str(tmp_path)).write(str(path), b"new")
    assert left.exists(), "it may be of another process that is writing"
    for each in (left, *others):
        os.utime(each, (time.time() - 3700,) * 2)
    LocalStore(str(tmp_path)).write(str(path), b"new")
    assert sorted(tmp_path.iterdir()) == sorted([path, *others])


def test_a_mirror_copies_new_and_changed_files_and_removes_others(store: FilesystemStore, tmp_path: Path) -> None:
    folder, path = tmp_path / "kept", store.get_run_path("run")
    (folder / "below").mkdir(parents=True)
    (folder / "best").write_bytes(b"one")
    (folder / "below" / "profile").write_bytes(b"two")
    store.write(f"{path}/checkpoint", b"of another writer")
    mirror = Mirror(folder, store, path)
    mirror.update()
    assert [store.read(f"{path}/{name}") for name in ("best", "below/profile")] == [b"one", b"two"]
    store.write(f"{path}/best", b"not written again")
    mirror.update()
    assert store.read(f"{path}/best") == b"not written again"
    (folder / "best").write_bytes(b"three")
    (folder / "below" / "profile").unlink()
    mirror.update()
    (folder / "best").unlink()
    store.remove(f"{path}/best")
    mirror.update()
    (folder / "best").write_bytes(b"three")
    mirror.update()
    assert [store.read(f"{path}/{name}") for name in ("best", "below/profile")] == [b"three", None]
    assert store.read(f"{path}/checkpoint") == b"of another writer"


def test_a_relative_path_means_the_same_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = Store.create("runs-here")
    monkeypatch.chdir("/")
    assert store.get_run_path("r") == f"{tmp_path}/runs-here/runs/r"


@pytest.mark.parametrize("run_id", ["../other", "a/b", "", ".hidden"])
def test_a_run_id_cannot_leave_the_store(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(ConfigError, match="run_id"):
        LocalStore(str(tmp_path)).get_run_path(run_id)


def test_an_unknown_file_system_is_refused() -> None:
    with pytest.raises(ConfigError, match="nosuch"):
        Store.create("nosuch://bucket/x")


def test_databricks_files_are_those_of_its_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"'dbfs:/ml/runs' lies in Databricks' file system, and .* is not there"):
        Store.create("dbfs:/ml/runs")
    monkeypatch.setattr("farandole.estimators.store._MOUNT", str(tmp_path))
    store = DBFSLocalStore("dbfs:/ml/runs")
    store.write(store.get_checkpoint_path("a"), b"content")
    assert (tmp_path / "ml" / "runs" / "runs" / "a" / "checkpoint").read_bytes() == b"content"
    assert store.is_local and store.prefix_path == f"file://{tmp_path}/ml/runs"


@pytest.fixture
def hadoop() -> Iterator[None]:
    with hadoop_in_memory():
        yield


@pytest.mark.usefixtures("hadoop")
@pytest.mark.parametrize(
    ("store", "address"),
    [
        (lambda: Store.create("hdfs://namenode01:8020/user/runs"), ("namenode01", 8020, None)),
        (lambda: Store.create("hdfs://namenode01:8020/user/runs", user="me"), ("namenode01", 8020, "me")),
        (lambda: HDFSStore("/user/runs", "namenode02", 8021, user="me"), ("namenode02", 8021, "me")),
        (lambda: HDFSStore("/user/runs"), ("default", 0, None)),
    ],
)
def test_a_store_in_hadoop_keeps_its_namenode(
    store: Callable[[], FilesystemStore], address: tuple[str, int, str | None]
) -> None:
    made = store()
    copy = pickle.loads(pickle.dumps(made.without_secrets()))
    assert isinstance(copy, HDFSStore)
    assert copy._files().address == made._files().address == address
    assert copy.get_checkpoint_path("r") == "/user/runs/runs/r/checkpoint"
    assert copy.url(copy.get_train_data_path(1)) == "hdfs:///user/runs/intermediate_train_data.1"


@pytest.mark.usefixtures("hadoop")
def test_a_crash_while_writing_keeps_the_old_file_in_hadoop(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.create(f"hdfs://namenode/{uuid.uuid4().hex}")
    path = store.get_checkpoint_path("run")
    store.write(path, b"old")
    whole = Hadoop.pipe_file

    def crash(files: Hadoop, path: str, value: bytes, **_: Any) -> None:
        whole(files, path, value[:1])
        raise OSError("the connection is lost")

    with monkeypatch.context() as broken, pytest.raises(OSError, match="connection is lost"):
        broken.setattr(Hadoop, "pipe_file", crash)
        store.write(path, b"new")
    assert store.read(path) == b"old"
    store.write(path, b"new")
    assert store.read(path) == b"new"
    assert store._files().ls(store.get_run_path("run"), detail=False) == [path]


@pytest.mark.usefixtures("hadoop")
def test_two_writers_in_hadoop_do_not_share_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.create(f"hdfs://namenode/{uuid.uuid4().hex}")
    path, written, whole = store.get_checkpoint_path("run"), [], Hadoop.pipe_file

    def interrupted(files: Hadoop, path: str, value: bytes, **_: Any) -> None:
        whole(files, path, value)
        written.append(path)
        if len(written) == 1:
            store.write(store.get_checkpoint_path("run"), b"of the other one")

    monkeypatch.setattr(Hadoop, "pipe_file", interrupted)
    store.write(path, b"whole")
    assert store.read(path) == b"whole" and len(set(written)) == 2


@pytest.mark.usefixtures("hadoop")
def test_what_hadoops_store_cannot_have_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"'file:///user' is not in Hadoop's file system; use Store\.create"):
        HDFSStore("file:///user")
    HDFSStore("/user", driver="libhdfs", temp_dir="/tmp")
    assert "driver and temp_dir of HDFSStore: no effect" in caplog.text


def test_folders_may_lie_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = LocalStore("p", train_path="file:///rows/train", val_path="held", test_path="/t", runs_path="/kept")
    assert (store.get_train_data_path(), store.get_train_data_path(2)) == ("/rows/train", "/rows/train.2")
    assert (store.get_val_data_path(), store.get_test_data_path()) == (f"{tmp_path}/held", "/t")
    assert (store.get_runs_path(), store.get_run_path("r")) == ("/kept", "/kept/r")
    with pytest.raises(ConfigError, match="save_runs: runs are always kept"):
        Store.create(str(tmp_path), save_runs=False)


def test_what_programs_of_horovod_call(store: FilesystemStore, tmp_path: Path) -> None:
    folder = store.get_run_path("run")
    assert isinstance(store, Store) and store.saving_runs() and FilesystemStore.matches(store.prefix_path)
    assert not FilesystemStore.matches("hdfs://a") and HDFSStore.matches("hdfs://a")
    assert (store.get_checkpoint_filename(), store.get_logs_subdir()) == ("checkpoint", "logs")
    named = Store.create(store.prefix_path, checkpoint_filename="last.ckpt")
    assert named.get_checkpoint_path("run") == f"{folder}/last.ckpt" and named.get_checkpoints("run") == []
    store.write_text(f"{folder}/b.ckpt", "two")
    store.write_text(f"{folder}/a.ckpt", "one")
    store.write_text(f"{folder}/note", "x")
    assert store.get_checkpoints("run") == [f"{folder}/a.ckpt", f"{folder}/b.ckpt"]
    assert store.get_localized_path(store.get_full_path(folder)) == store.get_localized_path(folder) == folder
    assert store.get_full_path_fn()(folder) == store.url(folder)
    with store.get_local_output_dir_fn("run")() as local:
        Path(local, "deep").mkdir()
        Path(local, "deep", "file").write_bytes(b"three")
        store.sync_fn("run")(local)
    assert not Path(local).exists() and store.read(f"{folder}/deep/file") == b"three"
    (tmp_path / "local").write_bytes(b"four")
    store.copy(str(tmp_path / "local"), f"{folder}/copied")
    assert store.fs.cat_file(f"{folder}/copied") == b"four" and store.get_filesystem().exists(f"{folder}/copied")


def test_parquet_files_of_a_store(store: FilesystemStore) -> None:
    path = store.get_train_data_path()
    assert not store.is_parquet_dataset(path)
    content = io.BytesIO()
    pq.write_table(pa.table({"n": [1, 2]}), content)
    store.write(f"{path}/part-0.parquet", content.getvalue())
    assert store.is_parquet_dataset(path) and store.get_parquet_dataset(path).read()["n"].to_pylist() == [1, 2]
    store.write(f"{path}/part-0.parquet", b"no Parquet")
    assert not store.is_parquet_dataset(path)


def test_a_store_can_be_extended(tmp_path: Path) -> None:
    class Mine(LocalStore):
        def __init__(self, path: str) -> None:
            self.opened = 1
            super().__init__(path)

        def get_logs_subdir(self) -> str:
            return "curves"

    store = Mine(str(tmp_path))
    store.opened += 1
    assert store.get_logs_path("run") == f"{tmp_path}/runs/run/curves"
    assert copy.deepcopy(store).opened == 2
    with pytest.raises(AttributeError, match=r"^Mine has no to_remote: ranks get the store itself"):
        _ = store.to_remote
    with pytest.raises(AttributeError, match=r"^Mine has no nothing$"):
        _ = store.nothing
