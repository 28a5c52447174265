"""Registry and configuration of a data service."""

import contextlib
import json
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("tensorflow")

from tensorflow.data.experimental.service import ShardingPolicy

from farandole.core.context import Context
from farandole.errors import AuthenticationError, ConfigError, RendezvousError
from farandole.tensorflow.data_service import (
    ComputeClient,
    ComputeService,
    TfDataServiceConfig,
    send_to_data_service,
    tf_data_service,
)
from farandole.tensorflow.data_service.servers import shared_name
from farandole.tensorflow.data_service.watch import report_lost_service
from helpers.ranks import run_ranks

KEY, OTHER = b"k" * 32, b"o" * 32


@contextlib.contextmanager
def serving(dispatchers: int = 1, workers: int = 1) -> Iterator[tuple[ComputeService, ComputeClient]]:
    with ComputeService(dispatchers, workers, KEY) as service:
        yield service, ComputeClient([service.address], KEY)


def later(wait: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Start `wait` in a thread; its value comes into the list."""
    values: list[object] = []
    thread = threading.Thread(target=lambda: values.append(wait()))
    thread.start()
    return thread, values


def config_of(service: ComputeService, **given: object) -> TfDataServiceConfig:
    plain = {"dispatchers": 1, "workers_per_dispatcher": 1, "dispatcher_side": "compute", "timeout": 1, **given}
    return TfDataServiceConfig(addresses={"lo": [service.address]}, key=KEY, **plain)  # type: ignore[arg-type]


def test_each_dispatcher_is_found_once_it_has_registered() -> None:
    with serving(dispatchers=2) as (_, client):
        first, found = later(lambda: client.wait_for_dispatcher_registration(1, 20))
        client.register_dispatcher(0, "grpc://here:1")
        client.register_dispatcher(1, "grpc://there:2")
        first.join(20)
        assert found == ["grpc://there:2"]
        assert client.wait_for_dispatcher_registration(0, 1) == "grpc://here:1"


def test_all_workers_of_a_dispatcher_are_waited_for() -> None:
    with serving(dispatchers=2, workers=2) as (_, client):
        client.register_worker_for_dispatcher(0, 0)
        client.register_worker_for_dispatcher(0, 0)
        client.register_worker_for_dispatcher(1, 2)
        with pytest.raises(RendezvousError, match=r"not all workers of dispatcher 0 have registered.*raise timeout"):
            client.wait_for_dispatcher_worker_registration(0, 0.2)
        waiting, _ = later(lambda: client.wait_for_dispatcher_worker_registration(0, 20))
        client.register_worker_for_dispatcher(0, 1)
        waiting.join(20)
        assert not waiting.is_alive()


def test_a_dispatcher_that_does_not_come_is_named() -> None:
    with serving() as (_, client), pytest.raises(RendezvousError, match=r"dispatcher 0 has not registered .*0\.2 s"):
        client.wait_for_dispatcher_registration(0, 0.2)


def test_refused_registrations() -> None:
    with serving() as (_, client):
        client.register_dispatcher(0, "grpc://here:1")
        client.register_dispatcher(0, "grpc://here:1")
        with pytest.raises(RendezvousError, match="is at grpc://here:1 already, not at grpc://there:2"):
            client.register_dispatcher(0, "grpc://there:2")
        with pytest.raises(RendezvousError, match="there is no dispatcher 1"):
            client.register_worker_for_dispatcher(1, 0)


@pytest.mark.parametrize("end", ["client", "server"])
def test_the_shutdown_ends_all_waits(end: str) -> None:
    with serving() as (service, client):
        waiting, _ = later(client.wait_for_shutdown)
        while not any(each.name == "farandole-compute-request" for each in threading.enumerate()):
            assert waiting.is_alive()
            time.sleep(0.01)
        (client if end == "client" else service).shutdown()
        waiting.join(20)
        assert not waiting.is_alive()
        if end == "client":
            with pytest.raises(RendezvousError, match="it has been shut down"):
                client.wait_for_dispatcher_registration(0, 20)
            with pytest.raises(RendezvousError, match="it has been shut down"):
                client.register_dispatcher(0, "grpc://here:1")


def test_another_key_is_refused() -> None:
    with serving() as (service, client):
        with pytest.raises(AuthenticationError):
            ComputeClient([service.address], OTHER).shutdown()
        client.register_dispatcher(0, "grpc://here:1")  # it still serves


def test_a_service_that_is_gone() -> None:
    with serving() as (_, client):
        pass
    with pytest.raises(RendezvousError, match=r"the compute service is not reached .*refused"):
        client.shutdown()


def test_the_file_of_a_configuration(tmp_path: Path) -> None:
    path = tmp_path / "service.json"
    config = TfDataServiceConfig(2, 3, "training", {"eth0": [("10.0.0.1", 99)]}, KEY, timeout=7)
    config.write(str(path))
    assert TfDataServiceConfig.read(str(path), wait_for_file_creation=True) == config
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["service.json"]
    assert json.loads(path.read_text())["key"] == KEY.hex() and KEY.hex() not in repr(config)
    assert config.compute_client(verbose=2).addresses == ["10.0.0.1:99"]


def test_wrong_configurations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "service.json"
    monkeypatch.setenv("FARANDOLE_START_TIMEOUT", "0.3")
    with pytest.raises(RendezvousError, match=r"is not there .*raise FARANDOLE_START_TIMEOUT"):
        TfDataServiceConfig.read(str(path), wait_for_file_creation=True)
    with pytest.raises(FileNotFoundError):
        TfDataServiceConfig.read(str(path))
    for text, problem in (("{", "is not JSON"), ("{}", "is no configuration of a data service"), ("[]", "is no conf")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=problem):
            TfDataServiceConfig.read(str(path))
    with pytest.raises(ConfigError, match="dispatcher_side: must be 'compute' or 'training'"):
        TfDataServiceConfig(1, 1, "both", {}, KEY)
    with pytest.raises(ConfigError, match="has no address"):
        TfDataServiceConfig(1, 1, "compute", {}, KEY).compute_client()
    with pytest.raises(ConfigError, match="dispatchers: must be >= 1, got 0"):
        ComputeService(0, 1, KEY)


def test_ranks_of_the_training_wait_for_the_service() -> None:
    with serving() as (service, client):
        with (
            pytest.raises(RendezvousError, match="dispatcher 0 has not registered"),
            tf_data_service(config_of(service), 3),
        ):
            pass
        client.register_dispatcher(0, "grpc://here:1")
        client.register_worker_for_dispatcher(0, 0)
        with tf_data_service(config_of(service), 3) as address:
            assert address == "grpc://here:1"
        with (
            pytest.raises(ConfigError, match="there is none for rank 2 with 2"),
            tf_data_service(config_of(service, dispatchers=2), 2),
        ):
            pass


@pytest.mark.parametrize(
    ("side", "arguments", "problem"),
    [
        ("training", {}, "dispatcher_side: is 'training'"),
        ("compute", {"round_robin": True, "size": 2}, "round_robin: needs reuse_dataset=True"),
        ("compute", {"round_robin": True, "reuse_dataset": True}, "round_robin: needs reuse_dataset=True and size="),
        ("compute", {"processing_mode": "off"}, "processing_mode: must be 'distributed_epoch'"),
        ("compute", {"processing_mode": ShardingPolicy.FILE}, "processing_mode: must be 'distributed_epoch'"),
    ],
)
def test_refused_ways_to_read(side: str, arguments: dict[str, object], problem: str) -> None:
    import tensorflow as tf

    config = TfDataServiceConfig(1, 1, side, {"lo": [("127.0.0.1", 1)]}, KEY)
    with pytest.raises(ConfigError, match=problem):
        send_to_data_service(tf.data.Dataset.range(3), config, 0, **arguments)  # type: ignore[arg-type]


def test_ranks_share_a_name_for_each_dataset_of_a_job() -> None:
    """With the name of an earlier dataset, also of another job, they would read what is left of that one."""

    def body(context: Context) -> list[str]:
        return [shared_name("grpc://here:1"), shared_name("grpc://here:1")]

    jobs = [run_ranks(2, body) for _ in range(2)]
    for one, other in jobs:
        assert one == other
    assert len({name for names, _ in jobs for name in names}) == 4


def test_datasets_that_are_shared_without_a_job_have_names_of_their_own() -> None:
    names = [shared_name(each) for each in ("grpc://a:1", "grpc://a:1", "grpc://b:1", "grpc://a:1")]
    assert names == ["job", "job.2", "job", "job.3"]


@pytest.mark.parametrize("end", ["shutdown", "close", "killed"])
def test_a_service_that_ends_without_a_shutdown_is_reported(end: str, caplog: pytest.LogCaptureFixture) -> None:
    with serving() as (_, client):
        watches = watched(client, 0 if end == "killed" else 2)
        while end != "killed" and not any(each.name == "farandole-compute-request" for each in threading.enumerate()):
            time.sleep(0.01)
        if end == "shutdown":
            client.shutdown()
    watches += watched(client, int(end == "killed"))  # nothing listens there any more
    for each in watches:
        each.join(30)
    assert ("is gone (" in caplog.text) == (end != "shutdown")


def watched(client: ComputeClient, times: int) -> list[threading.Thread]:
    """Watch the service, and return the threads that do, one at most."""
    before = set(threading.enumerate())
    for _ in range(times):
        report_lost_service(client)
    return [each for each in set(threading.enumerate()) - before if each.name == "farandole-data-service"]
