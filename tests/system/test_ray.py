"""Ranks as actors of a real Ray cluster on this machine; each test is a program that connects to it."""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.installed import require

require("ray")

pytestmark = [pytest.mark.native, pytest.mark.slow]

CLUSTER = """
import ray, sys
context = ray.init(
    num_cpus=4,
    num_gpus=0,
    include_dashboard=False,
    object_store_memory=80 << 20,
    _temp_dir=sys.argv[1],
)
print(context.address_info["address"], flush=True)
sys.stdin.read()
ray.shutdown()
"""
PROGRAM = """
import os, signal, sys, time
import numpy as np
import ray
ray.init(address=sys.argv[1], log_to_driver=False)
from farandole.ray import RayExecutor

def total(factor=1, *, offset=0):
    import farandole.numpy as hvd
    hvd.init()
    value = float(hvd.allreduce(np.array([hvd.rank() + 1.0]), op=hvd.Sum)[0])
    place = hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_size()
    hvd.shutdown()
    return *place, factor * value + offset

"""
Run = Callable[[str], str]
TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Return a function that runs a program in the cluster, checks its exit code, and returns its output."""
    folder = tempfile.mkdtemp(prefix="fd-ray-")  # Ray's sockets have short names only
    secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
    env = {**os.environ, **secret, "HOME": folder, "RAY_USAGE_STATS_ENABLED": "0"}
    words = [sys.executable, "-c", CLUSTER, f"{folder}/ray"]
    cluster = subprocess.Popen(words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(text: str) -> str:
        program = PROGRAM + textwrap.dedent(text)
        words = [sys.executable, "-c", program, address]
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=150, check=False)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    assert cluster.stdin is not None and cluster.stdout is not None
    try:
        with cluster.stdout, cluster.stdin:
            address = cluster.stdout.readline().strip()
            assert address, "Ray did not start"
            yield run
        cluster.wait(60)
    finally:
        cluster.kill()
        cluster.wait()
        shutil.rmtree(folder, ignore_errors=True)


def test_calls_on_ranks(run: Run) -> None:
    run("""
    class Model:
        def __init__(self, scale, bias=0):
            self.scale, self.bias = scale, bias
            self.named = os.environ["NAMED"]

    executor = RayExecutor(RayExecutor.create_settings(timeout_s=100), num_workers=2)
    executor.start(Model, [3], {"bias": 4}, extra_env_vars={"NAMED": "here"})
    ranks = [(0, 2, 0, 2, 1), (1, 2, 1, 2, 1)]
    assert executor.run(total) == [(*each, 3.0) for each in ranks]
    assert executor.run(total, [10], {"offset": 1}) == [(*each, 31.0) for each in ranks]
    assert ray.get(executor.run_remote(total, [2])) == [(*each, 6.0) for each in ranks]
    assert executor.execute(lambda model: model.scale * total()[0] + model.bias) == [4, 7]
    assert executor.execute_single(lambda model: (model.named, os.environ["RANK"])) == ("here", "0")
    names = executor.run(lambda: (os.environ["WORLD_SIZE"], os.environ["MASTER_PORT"]))
    assert names[0] == names[1] and names[0][0] == "2"
    assert executor.num_workers == 2
    try:
        executor.start()
    except ValueError as error:
        assert str(error) == "start: the ranks run already; call shutdown() first"
    else:
        raise AssertionError
    executor.shutdown()
    executor.shutdown()
    executor.start(extra_env_vars={"FARANDOLE_TORCH_ENV": "no"})  # as the executor of compat does
    assert executor.run(lambda: "RANK" in os.environ) == [False, False]
    assert executor.run(os.getpid) != executor.run(os.getppid)
    executor.shutdown()
    """)


def test_the_rank_that_failed_first_is_reported(run: Run) -> None:
    said = run("""
    def fail(how):
        import farandole.numpy as hvd
        hvd.init()
        if hvd.rank() == 1:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise LookupError("no such thing")
        hvd.allreduce(np.ones(3), name="waits")

    from farandole.errors import RankFailed
    executor = RayExecutor(num_workers=3)
    for how in ("raise", "kill"):
        executor.start()
        before = time.monotonic()
        try:
            executor.run(fail, [how])
        except RankFailed as error:
            print(how, error.rank, type(error.__cause__).__name__, round(time.monotonic() - before < 60))
            print(error)
        try:
            executor.run(total)
        except ValueError as error:
            print(error)
    executor.start()
    assert len(executor.run(total)) == 3
    executor.shutdown()
    for _ in range(100):  # Ray gives resources back soon
        if ray.available_resources()["CPU"] == 4.0:
            break
        time.sleep(0.1)
    assert ray.available_resources()["CPU"] == 4.0
    """)
    lines = said.splitlines()
    assert lines[0] == "raise 1 LookupError 1"
    assert lines[1] == "rank 1 failed: LookupError: no such thing"
    assert "Traceback (most recent call last):" in lines and "LookupError: no such thing" in lines
    assert "kill 1 ActorDiedError 1" in lines
    assert any(line.startswith("rank 1 failed: its process has ended: ") for line in lines)
    assert lines.count("start: no ranks run; call start() first") == 2
    assert not any("\x1b" in line for line in lines if "(raylet)" not in line)


def test_ctrl_c_ends_the_ranks(run: Run) -> None:
    said = run("""
    import threading
    executor = RayExecutor(num_workers=2)
    executor.start()
    pids = executor.run(os.getpid)
    threading.Timer(1.0, signal.raise_signal, (signal.SIGINT,)).start()
    before = time.monotonic()
    try:
        executor.run(time.sleep, [100])
    except KeyboardInterrupt:
        print("interrupted", time.monotonic() - before < 60)
    for _ in range(300):
        if not any(os.path.exists(f"/proc/{pid}") for pid in pids):
            break
        time.sleep(0.1)
    print("left", [pid for pid in pids if os.path.exists(f"/proc/{pid}")])
    try:
        executor.run(total)
    except ValueError as error:
        print(error)
    """)
    assert said.splitlines() == ["interrupted True", "left []", "start: no ranks run; call start() first"]


def test_an_elastic_job_goes_on_without_a_killed_actor(run: Run, tmp_path: Path) -> None:
    said = run(f"""
    import threading
    from pathlib import Path
    sys.path.insert(0, {str(TESTS)!r})
    from helpers.spark_elastic import expected_weight, place_of, training
    import cloudpickle
    from farandole.ray import ElasticRayExecutor, RayHostDiscovery
    folder = Path({str(tmp_path)!r})

    def kill_an_actor():
        try:
            pids = {{place_of(folder, rank=rank, size=2).pid for rank in range(2)}}
            actor = place_of(folder, rank=1, size=2).pid
            while b"AgentActor" not in Path(f"/proc/{{actor}}/cmdline").read_bytes():
                actor = int(Path(f"/proc/{{actor}}/stat").read_text().rpartition(")")[2].split()[1])
            os.kill(actor, signal.SIGKILL)
            left = place_of(folder, rank=0, size=1).pid
            assert left in pids and place_of(folder, rank=0, size=2).pid == left
            print("went on")
        finally:
            (folder / "end").touch()

    assert list(RayHostDiscovery(cpus_per_slot=2).find_available_hosts_and_slots().values()) == [2]
    killer = threading.Thread(target=kill_an_actor)
    killer.start()
    executor = ElasticRayExecutor(ElasticRayExecutor.create_settings(min_num_proc=1, max_num_proc=2, timeout_s=100))
    executor.start()
    cloudpickle.register_pickle_by_value(sys.modules["helpers.spark_elastic"])
    values = executor.run(lambda: training(str(folder)))
    killer.join()
    assert [value[:2] for value in values] == [(values[0][0], expected_weight(values[0][0]))] * 2, values
    """)
    assert "went on\n" in said


def test_places(run: Run) -> None:
    run("""
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    executor = RayExecutor(num_hosts=1, num_workers_per_host=3)
    executor.start()
    assert [each[:2] for each in executor.run(total)] == [(0, 3), (1, 3), (2, 3)]
    executor.shutdown()

    short = RayExecutor.create_settings(placement_group_timeout_s=1)
    for wanted in ({"num_workers": 5}, {"num_hosts": 2}, {"num_workers": 1, "use_gpu": True}):
        try:
            RayExecutor(short, **wanted).start()
        except TimeoutError as error:  # what Horovod raises
            assert "the Ray cluster after 1 s (a rank takes 1 CPU" in str(error) or "1 CPU and 1 GPU" in str(error)
        else:
            raise AssertionError(wanted)

    @ray.remote(num_cpus=0)
    def within():
        executor = RayExecutor(num_workers=2)
        executor.start()
        values = executor.run(total)
        executor.shutdown()
        return values

    group = placement_group([{"CPU": 1}] * 4)  # all that there is: ranks run in it, or not at all
    assert group.wait(60)
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
    assert [each[1] for each in ray.get(within.options(scheduling_strategy=strategy).remote())] == [2, 2]
    assert [each["CPU"] for each in group.bundle_specs] == [1, 1, 1, 1]
    remove_placement_group(group)
    """)


def test_arguments_that_are_refused(run: Run) -> None:
    said = run("""
    class Held:
        def __init__(self):
            import threading
            self.lock = threading.Lock()

    held = Held()
    def refused(action):
        try:
            action()
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
        else:
            raise AssertionError(action)

    refused(lambda: RayExecutor())
    refused(lambda: RayExecutor(num_workers=2, num_hosts=2))
    refused(lambda: RayExecutor(num_workers=2, min_workers=2))
    refused(lambda: RayExecutor(min_workers=2))
    refused(lambda: RayExecutor(num_workers=0))
    refused(lambda: RayExecutor(num_workers=1, gpus_per_worker=1))
    refused(lambda: RayExecutor(num_workers=1, use_gpu=True, gpus_per_worker=0))
    assert RayExecutor.create_settings(nics=["eth0", "eth1"]).interface == "eth0,eth1"
    refused(lambda: RayExecutor(num_workers=1).run(total))
    with_rank = RayExecutor(num_workers=1)
    with_rank.start()
    refused(lambda: with_rank.run(total, callbacks=[print]))
    refused(lambda: with_rank.run(lambda: held))
    with_rank.shutdown()
    """)
    expected = """
    ConfigError: num_workers: give num_workers, or num_hosts with num_workers_per_host
    ConfigError: num_workers: give num_workers, or num_hosts with num_workers_per_host
    ValueError: Both `min_workers` and `num_workers` provided.
    ConfigError: min_workers: these ranks are not elastic; give num_workers, or use ElasticRayExecutor
    ConfigError: num_workers: must be >= 1, got 0
    ConfigError: gpus_per_worker: needs use_gpu=True
    ConfigError: gpus_per_worker: must be > 0, got 0; leave use_gpu out to use none
    ConfigError: start: no ranks run; call start() first
    ConfigError: callbacks: ranks send no values while they run; return them from the function
    """
    lines = said.splitlines()
    assert lines[:9] == [line.strip() for line in expected.strip().splitlines()]
    assert len(lines) == 10 and lines[9].startswith("PicklingError: cannot send ") and "held" in lines[9]


def test_a_program_of_horovod(run: Run) -> None:
    """Unchanged, with `import horovod` on driver and ranks."""
    require("torch")
    said = run("""
    import farandole.compat
    farandole.compat.install()
    from horovod.ray import RayExecutor
    import horovod.data

    class Trainer:
        kind = horovod.data.AsyncDataLoaderMixin

        def train(self):
            import horovod.torch as hvd
            import torch
            hvd.init()
            return hvd.rank(), hvd.allreduce(torch.ones(1) * hvd.rank(), op=hvd.Sum).item()

    settings = RayExecutor.create_settings(timeout_s=100)
    executor = RayExecutor(settings, num_workers=2, cpus_per_worker=1, use_gpu=False)
    executor.start(executable_cls=Trainer)
    print(executor.execute(lambda trainer: trainer.train()))
    executor.shutdown()
    """)
    assert said == "[(0, 1.0), (1, 1.0)]\n"
