"""Elastic training as public reports against Horovod describe it: each names what must not happen here.

Those about Keras are checks of `helpers.keras_elastic_reports`."""

import ctypes
import os
import signal
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from farandole import elastic
from farandole.core import default
from farandole.core.context import Context
from farandole.core.default import use
from farandole.core.wiring import start
from farandole.elastic import HorovodInternalError, HostsUpdatedInterrupt, ObjectState
from farandole.launch.backend import Host
from farandole.launch.elastic.roster import Form, Limits, Roster, Start
from farandole.launch.failures import Failure
from farandole.meeting.rendezvous import SoloRendezvous, ThreadRendezvous
from farandole.numpy import Sum, allreduce, allreduce_async, synchronize
from helpers.device_arrays import ProtocolArray, binding_of
from helpers.installed import require
from helpers.ranks import run_ranks
from helpers.stand_in_cuda import built, load
from system.elastic_training import TRAINING, training
from system.launched import wait_for_files

pytestmark = pytest.mark.native

LIMITS = Limits(least=2, most=3, wanted=2, start=30.0, patience=60.0, resets=None, cooldown=(1.0, 300.0))


def test_3494_a_newcomer_gets_the_state_of_a_rank_whose_hosts_only_left() -> None:
    """horovod #3494: ranks that hosts have left wait for enough others, and go on without a sync.

    The newcomers wait in the sync: no rank may skip what another one takes part in."""

    def body(context: Context) -> tuple[int, float]:
        before = ExitStack()

        def train(state: ObjectState) -> tuple[int, float]:
            if default.size() == 1:
                state.step = 5
                state.save()
                raise HostsUpdatedInterrupt(skip_sync=True)
            return state.step, float(allreduce(np.ones(1), op=Sum)[0])

        if context.rank == 0:
            before.enter_context(use(before.enter_context(Context(SoloRendezvous()))))
        state = ObjectState(step=0)
        return elastic.run_fn(train, lambda commits: before.close())(state)

    assert run_ranks(2, body) == [(5, 2.0)] * 2


def test_3399_samples_are_not_repeated_after_a_host_has_left() -> None:
    """horovod #3399: the sampler forgot what was processed since the last commit when a host left in good order."""
    require("torch")
    from farandole.torch.elastic import ElasticSampler, TorchState

    def body(context: Context) -> list[int]:
        sampler = ElasticSampler(range(24), shuffle=True)
        state = TorchState(sampler=sampler)
        seen: list[int] = []
        interrupted = False
        for place in range(0, len(sampler), 2):
            seen += list(sampler)[place : place + 2]
            sampler.record_batch(place // 2, 2)
            if place == 4:  # after three batches, none of which is committed
                state.on_hosts_updated(0.0, 1)
            try:
                state.check_host_updates()
            except HostsUpdatedInterrupt:
                interrupted = True
                break
        assert interrupted
        if context.rank == 0:
            with Context(SoloRendezvous()) as alone, use(alone):
                state.on_reset()
                seen += list(sampler)
        return seen

    first, second = run_ranks(2, body)
    assert sorted(first + second) == list(range(24))


def test_3111_an_error_of_nccl_is_raised_in_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """horovod #3111: an error of NCCL, raised in a thread of the library's, aborted the survivors of a lost rank.

    The communicator is aborted instead, and the ranks that are left have one of their own in the next generation."""
    load()
    path = str(built("stand_in_nccl", "libstand_in_nccl.so.2"))
    nccl = ctypes.CDLL(path)
    monkeypatch.setattr(start, "find_nccl", lambda: [path])
    hvd = binding_of(ProtocolArray)
    meetings, together = ThreadRendezvous.group(2), threading.Barrier(2, timeout=30)

    def body(context: Context) -> None:
        mine = ProtocolArray.of(np.ones(9, np.float32), context.rank)
        hvd.allreduce_(mine, op=hvd.Sum, name="x").read()
        together.wait()
        nccl.stand_in_nccl_stuck(1)
        handle = hvd.allreduce_async_(mine, op=hvd.Sum, name="x")
        time.sleep(0.05)
        together.wait()
        nccl.stand_in_nccl_break(6)
        with pytest.raises(HorovodInternalError):
            hvd.synchronize(handle)
        context.shutdown()
        together.wait()
        nccl.stand_in_nccl_stuck(0)
        nccl.stand_in_nccl_break(0)
        with Context(meetings[context.rank]) as again, use(again):
            fresh = ProtocolArray.of(np.ones(9, np.float32), context.rank)
            np.testing.assert_array_equal(hvd.allreduce(fresh, op=hvd.Sum, name="x").read(), np.full(9, 2))

    try:
        run_ranks(2, body)
    finally:
        nccl.stand_in_nccl_stuck(0)
        nccl.stand_in_nccl_break(0)


def test_3264_the_ranks_of_other_hosts_outlive_a_host(tmp_path: Path) -> None:
    """horovod #3264: all processes of a host were killed, and those of the other host aborted."""
    with training(tmp_path, "-np", "4", "--min-np", "2", "--max-np", "4", "-H", "localhost:2,127.0.0.1:2") as job:
        job.wait(lambda: len(job.pids()) == 4 and 4 in job.sizes(), "the first steps")
        before = job.pids()
        for number in (2, 3):
            os.kill(before[number], signal.SIGKILL)
        since = len(job.output)
        job.wait(lambda: 2 in job.sizes(since) or 4 in job.sizes(since), "the survivors go on")
        assert {before[0], before[1]} <= set(job.finish())


def test_a_rank_whose_call_in_c_holds_pythons_lock_is_not_lost(tmp_path: Path) -> None:
    """Rank 0 pickles a checkpoint, or sorts: it answers nobody meanwhile, and the others wait for it."""
    call = "os.path.exists(f'hold {os.getpid()}') and (os.remove(f'hold {os.getpid()}'), PyDLL(None).sleep(4))"
    program = TRAINING.replace("        time.sleep(0.01)", f"        {call}\n        time.sleep(0.01)")
    with training(tmp_path, "-np", "2", "--min-np", "1", program=f"from ctypes import PyDLL\n{program}") as job:
        job.wait(lambda: 2 in job.sizes(), "the first steps")
        before = job.pids()
        hold = tmp_path / f"hold {before[0]}"
        hold.touch()
        job.wait(lambda: not hold.exists(), "the call")
        since = len(job.output)
        job.wait(lambda: bool(job.sizes(since)), "a step after the call")
        assert set(job.finish()) == set(before.values())


def _die_with_work_in_flight(context: Context, folder: Path) -> str:
    if context.rank == 2:
        wait_for_files(folder, ["0", "1"])
        os.kill(os.getpid(), signal.SIGKILL)
    with use(context):
        handles = [allreduce_async(np.ones(1000, np.float32), name=f"gradient{each}") for each in range(20)]
        (folder / str(context.rank)).write_text("20\n")
        for handle in handles:
            with pytest.raises(HorovodInternalError):
                synchronize(handle)
        return "each one raised"


def test_2484_every_operation_in_flight_raises(tmp_path: Path) -> None:
    """horovod #2484: an exception that nobody catches ended the survivors of a killed rank, instead of their calls."""
    results = run_ranks(3, _die_with_work_in_flight, tmp_path, how="processes", dies=[2])
    assert results[:2] == ["each one raised"] * 2


def test_3014_a_rank_that_is_lost_while_others_wait_for_their_places() -> None:
    """horovod #3014: a worker that was ready failed while the driver made places, and no worker got any."""
    roster = Roster(replace(LIMITS, most=2))
    roster.find_hosts([Host("a", 2)])
    assert [each.number for each in roster.step(0.0) if isinstance(each, Start)] == [0, 1]
    roster.come(0, -1, 1.0)
    roster.come(1, -1, 1.0)
    roster.lose(1, Failure(rank=1, reason="was killed", code=137, killed=True), 1.0)  # before places were made
    assert not [each for each in roster.step(1.0) if isinstance(each, Form)]
    again = [each.number for each in roster.step(5.0) if isinstance(each, Start)]
    assert again == [2]
    roster.come(2, -1, 6.0)
    assert [each.members for each in roster.step(6.0) if isinstance(each, Form)] == [(0, 2)]
