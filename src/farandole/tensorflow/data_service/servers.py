"""Dispatchers and workers of TensorFlow's data service, on ranks of the training or of a job of their own."""

import ctypes
import hmac
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import tensorflow as tf
from tensorflow.data.experimental.service import ShardingPolicy

from farandole.config import Config
from farandole.core.default import context, init, is_initialized, membership, rank, size
from farandole.core.operations.ops import barrier
from farandole.core.wiring.own_address import address_toward
from farandole.errors import ConfigError
from farandole.meeting.addresses import join_address, split_address
from farandole.meeting.frames import Deadline
from farandole.tensorflow.data_service.config import TfDataServiceConfig
from farandole.tensorflow.data_service.registry import ComputeClient
from farandole.tensorflow.data_service.watch import report_lost_service

HEARTBEAT = 1000  # milliseconds
SCHEME = "grpc://"
# Other sharding policies need dispatchers that know the addresses of all workers when they start.
MODES = ("distributed_epoch", "parallel_epochs", ShardingPolicy.DYNAMIC, ShardingPolicy.OFF)

log = logging.getLogger(__name__)

_sent: Counter[str] = Counter()  # datasets that this process has shared before `init()`, by dispatcher


@contextmanager
def tf_data_service(compute_config: TfDataServiceConfig, rank: int) -> Iterator[str]:
    """Yield the address of the dispatcher for the training rank `rank`, for `tf.data.experimental.service.distribute`.

    There is one for all ranks, or one for each. With `dispatcher_side="training"` this process starts it, if it is its
    own or it is rank 0, and stops it after the block; one of all ranks, when all ranks of the job have left the block.
    Waits for the dispatcher and for all its workers, each up to `compute_config.timeout`. Logs an error when the
    service ends without a shutdown, because TensorFlow then waits for it in silence, for an hour. Raises what
    `ComputeClient` raises, and `ConfigError` for a rank without a dispatcher."""
    number = rank if compute_config.dispatchers > 1 else 0
    if number >= compute_config.dispatchers:
        problem = (
            f"there is none for rank {rank} with {compute_config.dispatchers}; start as many as ranks train, or one"
        )
        raise ConfigError("dispatchers", problem)
    client = compute_config.compute_client()
    with ExitStack() as servers:
        if compute_config.dispatcher_side == "training" and number == rank:
            _serve_dispatcher(client, number, servers)
        address = client.wait_for_dispatcher_registration(number, compute_config.timeout)
        client.wait_for_dispatcher_worker_registration(number, compute_config.timeout)
        report_lost_service(client)
        yield address
        if compute_config.dispatcher_side == "training" and compute_config.dispatchers == 1 and is_initialized():
            barrier()  # a rank whose dispatcher ends while it reads waits for it in TensorFlow, for an hour


def send_to_data_service(
    dataset: tf.data.Dataset,
    compute_config: TfDataServiceConfig,
    rank: int,
    size: int | None = None,
    processing_mode: str = "distributed_epoch",
    reuse_dataset: bool = False,
    round_robin: bool = False,
) -> tf.data.Dataset:
    """Return a dataset whose elements the data service makes by the steps of `dataset`, for the training rank `rank`.

    With `reuse_dataset` the ranks of one dispatcher share the elements of one pass, the first come, first served; with
    `round_robin` too, each of `size` ranks gets every `size`-th element of an endless dataset. All ranks must then send
    their datasets in the same order. Waits and raises as
    `tf_data_service` does. Raises `ConfigError` for dispatchers on the training side, which this call would end, and
    for a `processing_mode` that shards by file, by row or by hint."""
    if compute_config.dispatcher_side == "training":
        problem = "is 'training', and such a dispatcher ends with its block: call distribute within tf_data_service"
        raise ConfigError("dispatcher_side", problem)
    if round_robin and (not reuse_dataset or size is None):
        raise ConfigError("round_robin", "needs reuse_dataset=True and size=, the number of ranks")
    if processing_mode not in MODES:
        modes = "'distributed_epoch' (each row once) or 'parallel_epochs' (each worker has all rows)"
        raise ConfigError("processing_mode", f"must be {modes}, got {processing_mode!r}")
    with tf_data_service(compute_config, rank) as address:
        return dataset.apply(
            tf.data.experimental.service.distribute(
                processing_mode=processing_mode,
                service=address,
                job_name=shared_name(address) if reuse_dataset else None,
                consumer_index=rank if round_robin else None,
                num_consumers=size if round_robin else None,
            )
        )


def shared_name(address: str) -> str:
    """Return the name of the next dataset that the ranks of this job share at the dispatcher `address`.

    Whoever gives the service the name of an earlier dataset, also of another job, gets what is left of that one. Before
    `init()` the names are those of a count in this process, which is the same on ranks that send the same datasets."""
    if not is_initialized():
        _sent[address] += 1
        return "job" if _sent[address] == 1 else f"job.{_sent[address]}"
    meeting = context().rendezvous
    label = f"data service of generation {meeting.generation}".encode()
    return membership().wire_name(f"job.{hmac.new(meeting.secret, label, 'sha256').hexdigest()[:16]}", None)


def compute_worker_fn(compute_config: TfDataServiceConfig) -> None:
    """Serve as one rank of the data service until it is shut down; call it on all ranks of a job of their own.

    The ranks of one dispatcher follow each other, and the first of them runs the dispatcher on the compute side. Calls
    `init()`. Raises `ConfigError` for another number of ranks than that of all workers, and what `ComputeClient`
    raises."""
    init()
    workers = compute_config.dispatchers * compute_config.workers_per_dispatcher
    if size() != workers:
        raise ConfigError(
            "workers_per_dispatcher", f"makes {workers} workers in all, but {size()} ranks serve; start {workers}"
        )
    number, place = divmod(rank(), compute_config.workers_per_dispatcher)
    client = compute_config.compute_client()
    with ExitStack() as servers:
        if compute_config.dispatcher_side == "compute" and place == 0:
            _serve_dispatcher(client, number, servers)
        address = client.wait_for_dispatcher_registration(number, compute_config.timeout)
        worker = tf.data.experimental.service.WorkerServer(
            tf.data.experimental.service.WorkerConfig(
                dispatcher_address=address.removeprefix(SCHEME),
                worker_address=f"{join_address(_own_address(client), 0)[:-1]}%port%",
                heartbeat_interval_ms=HEARTBEAT,
                dispatcher_timeout_ms=compute_config.timeout * 1000,
            )
        )
        _keep(worker)
        client.register_worker_for_dispatcher(number, rank())
        log.info("worker %d of the data service serves dispatcher %d at %s", rank(), number, address)
        client.wait_for_shutdown()


def _keep(worker: tf.data.experimental.service.WorkerServer) -> None:
    """Keep a worker until its process ends.

    Its end waits for requests of ranks that are gone, as with round robin, and holds Python's lock meanwhile."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(worker))


def _serve_dispatcher(client: ComputeClient, number: int, servers: ExitStack) -> None:
    """Start a dispatcher, which `servers` stops, and register it."""
    server = tf.data.experimental.service.DispatchServer()
    servers.callback(server.stop)
    port = split_address(server.target.removeprefix(SCHEME))[1]
    client.register_dispatcher(number, f"{SCHEME}{join_address(_own_address(client), port)}")


def _own_address(client: ComputeClient) -> str:
    """Return this host's address on the setting `interface`, or else on the way to the compute service.

    TensorFlow's servers listen on all interfaces; this one is what the others are told."""
    config = Config.from_environment()
    return address_toward(client.addresses[0], config, Deadline(config.start_timeout))
