"""Flyte tasks that tests run. Import it within a test: importing flytekit replaces the handler of Ctrl-C."""

from pathlib import Path
from typing import NamedTuple

from flytekit import Deck, Resources, current_context, map_task, task, workflow
from flytekit.core.base_task import IgnoreOutputs
from flytekit.types.file import FlyteFile
from flytekitplugins.kfmpi import Launcher, MPIJob, Worker

from farandole.errors import PeerLost
from farandole.integrations.flyte import CleanPodPolicy, Farandole, RunPolicy

__all__ = [
    *("Trained", "configured", "fails", "interrupted", "mapped", "ours", "resumed", "shown", "theirs", "train"),
    *("trained", "unequal"),
]


class Trained(NamedTuple):
    total: float
    report: FlyteFile


@task(
    task_config=Farandole(
        num_workers=4,
        min_workers=2,
        slots=2,
        requests=Resources(cpu="1"),
        limits=Resources(cpu="2", mem="4Gi"),
        launcher_requests=Resources(cpu="500m"),
        image="registry/worker:2",
        restart=True,
        run_policy=RunPolicy(
            clean_pod_policy=CleanPodPolicy.ALL,
            ttl_seconds_after_finished=100,
            active_deadline_seconds=100,
            backoff_limit=5,
        ),
    ),
    retries=2,
)
def configured(x: int) -> int:
    return x


@task(task_config=MPIJob(launcher=Launcher(replicas=1), worker=Worker(replicas=3), slots=2))
def theirs(x: int) -> int:
    return x


@task(task_config=Farandole(num_workers=3, slots=2))
def ours(x: int) -> int:
    return x


@task(task_config=Farandole(num_workers=2))
def train(x: int, scale: float, folder: str) -> Trained:
    import numpy as np

    import farandole.numpy as hvd

    hvd.init()
    total = float(hvd.allreduce(np.array([scale * (x + hvd.rank())]), op=hvd.Sum)[0])
    report = Path(folder) / f"rank{hvd.rank()}"
    report.write_text(f"rank {hvd.rank()} of {hvd.size()} in {current_context().execution_id.name is not None}")
    if hvd.rank() == 0:
        current_context().checkpoint.write(b"weights")
    hvd.shutdown()
    return Trained(total, FlyteFile(str(report)))


@workflow
def trained(x: int, folder: str) -> Trained:
    return train(x=x, scale=2.0, folder=folder)


@task(task_config=Farandole(num_workers=2))
def fails(how: str) -> int:
    import os
    import signal
    import sys

    rank = int(os.environ["RANK"])
    if how == "leave":
        sys.exit()
    if how == "ignore":
        raise IgnoreOutputs(f"rank {rank} has none")
    if how == "miss":
        raise PeerLost("allreduce.x", 1 - rank, "no sign of life for 60 s")
    if rank == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("no such column: 'Sales'")
    return 0


@task(task_config=Farandole(num_workers=1), enable_deck=True)
def shown(literals: int) -> int:
    Deck("losses", f"<b>after {literals} epochs</b>")
    return 2 * literals


@workflow
def mapped() -> list[int]:
    made: list[int] = map_task(shown)(literals=[3, 4])
    return made


@task(task_config=Farandole(num_workers=1))
def unequal(count: int) -> tuple[int, int]:
    return (1,) * count if count else 1  # type: ignore[return-value]


@task(task_config=Farandole(num_workers=2), retries=1)
def resumed() -> list[int]:
    import os
    import pickle
    import signal

    import farandole.numpy as hvd

    hvd.init()
    checkpoint = current_context().checkpoint
    saved = checkpoint.read()
    done: list[int] = [] if saved is None else pickle.loads(saved)
    first = len(done)
    for epoch in range(first, 4):
        done = [*done, epoch + 100 * (first > 0)]
        hvd.barrier()
        if hvd.rank() == 0:
            checkpoint.write(pickle.dumps(done))
        hvd.barrier()
        if epoch == 1 and first == 0 and hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    hvd.shutdown()
    return done


@task(task_config=Farandole(num_workers=2, restart=True), retries=1)
def interrupted(folder: str) -> list[int]:
    """Return the four epochs' numbers, each plus 100 times the epochs in the checkpoint; hang in epochs 0 and 1."""
    import pickle
    import threading
    import time

    import farandole.numpy as hvd

    hvd.init()
    checkpoint = current_context().checkpoint
    if hvd.rank() == 1 and (Path(folder) / "late").exists():
        time.sleep(1.0)  # rank 0 writes the checkpoint in this second
    saved = checkpoint.read()
    done: list[int] = [] if saved is None else pickle.loads(saved)
    first = len(done)
    for epoch in range(first, 4):
        done = [*done, epoch + 100 * first]
        if hvd.rank() == 0:
            checkpoint.write(pickle.dumps(done))
        hvd.barrier()
        if epoch < 2:
            (Path(folder) / "late").touch()
            (Path(folder) / f"rank{hvd.rank()}").touch()
            threading.Event().wait(100)
    hvd.shutdown()
    return done
