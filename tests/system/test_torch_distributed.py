"""torch.distributed's own programs over farandole: the same results as over gloo, errors where ranks die."""

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.checkpoint import load, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import farandole as launcher
from farandole.core.context import Context
from farandole.errors import PeerLost
from farandole.launch.reserved import ReservedPort
from helpers.deaths import wait_for_others
from helpers.programs import run
from helpers.ranks import run_ranks
from system.launched import farandole

EXAMPLE = Path(__file__).parents[2] / "examples" / "torch_ddp.py"
STEPS = 4

# Each rank imports torch.
pytestmark = pytest.mark.timeout(300)

Parameters = dict[str, torch.Tensor]


class Network(torch.nn.Module):
    """With a branch that not every step takes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 32)
        self.norm = torch.nn.BatchNorm1d(32)
        self.second = torch.nn.Linear(32, 3)
        self.rarely = torch.nn.Linear(6, 3)

    def forward(self, rows: torch.Tensor, rare: bool) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.relu(self.norm(self.first(rows))))
        return out + self.rarely(rows) if rare else out


def train(
    model: torch.nn.Module, wrapped: torch.nn.Module, *, rare: bool = False, skip: bool = False, steps: int = STEPS
) -> Parameters:
    """Train on rows of this rank's own; the parameters and buffers at the end."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=0.01)
    for step in range(steps):
        waits = skip and step % 2 == 0
        with wrapped.no_sync() if waits else nullcontext():  # type: ignore[operator]
            wrapped(torch.randn(8, 6, generator=generator), not rare or step % 2 == 0).square().mean().backward()
        if not waits:
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def ddp(group: dist.ProcessGroup, how: str) -> Parameters:
    torch.manual_seed(dist.get_rank())  # DDP gives all ranks the parameters of rank 0
    model = Network()
    wrapped = DistributedDataParallel(
        model,
        process_group=group,
        find_unused_parameters=how == "unused",
        static_graph=how == "static",
        gradient_as_bucket_view=how == "views",
        bucket_cap_mb=0.001,  # several buckets
    )
    hooks: dict[str, Callable[..., object]] = {
        "bf16": bf16_on_a_cpu,
        "fp16": default_hooks.fp16_compress_hook,
        "python": default_hooks.allreduce_hook,
    }
    if how in hooks:
        wrapped.register_comm_hook(group, hooks[how])
    if how == "native fp16":
        wrapped._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    if how == "joined":
        with wrapped.join(divide_by_initial_world_size=False):
            return train(model, wrapped, steps=STEPS - dist.get_rank())
    return train(model, wrapped, rare=how == "unused", skip=how == "no_sync")


def sharded(group: dist.ProcessGroup, folder: Path) -> Parameters:
    """Train with fully_shard, by way of a checkpoint."""
    torch.manual_seed(0)
    model = Network()
    mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
    for part in (model.first, model.second):
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, model)
    state = {name: value for name, value in model.state_dict().items() if "norm" not in name}
    save(state, checkpoint_id=folder, process_group=group)
    torch.manual_seed(1)
    again = Network()
    for part in (again.first, again.second):
        fully_shard(part, mesh=mesh)
    fully_shard(again, mesh=mesh)
    loaded = {name: value for name, value in again.state_dict().items() if "norm" not in name}
    load(loaded, checkpoint_id=folder, process_group=group)
    return {name: value.full_tensor().clone() for name, value in loaded.items()}


def bf16_on_a_cpu(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Do what torch's hook does, which DDP takes, by its name, with CUDA only."""
    return default_hooks.bf16_compress_hook(group, bucket)


DDP_WAYS = ["plain", "unused", "static", "views", "no_sync", "bf16", "fp16", "native fp16", "joined", "python"]


def compare(folder: Path) -> dict[str, list[str]]:
    """Do everything over both backends; for each, the parameters that differ."""
    torch.set_num_threads(1)
    dist.init_process_group(backend="farandole")  # env://; nobody has imported farandole.torch
    groups = {"farandole": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    assert {name: dist.get_backend(group) for name, group in groups.items()} == {name: name for name in groups}
    differing: dict[str, list[str]] = {}
    for how in [*DDP_WAYS, "fully_shard"]:
        got = {
            name: sharded(group, folder / name) if how == "fully_shard" else ddp(group, how)
            for name, group in groups.items()
        }
        ours, theirs = got["farandole"], got["gloo"]
        assert ours.keys() == theirs.keys() and len(ours) > 5
        differing[how] = [name for name, value in ours.items() if not torch.equal(value, theirs[name])]
    init_device_mesh("cpu", (2,))
    objects: list[object] = [None, None]
    dist.all_gather_object(objects, {"rank": dist.get_rank()})
    differing["objects"] = [] if objects == [{"rank": 0}, {"rank": 1}] else [str(objects)]
    dist.destroy_process_group()
    dist.init_process_group(backend="farandole", timeout=timedelta(seconds=60))  # once more, at the same port
    total = torch.ones(3)
    dist.all_reduce(total)
    differing["again"] = [] if total.tolist() == [2.0] * 3 else [str(total)]
    return differing  # and ends without destroying its group, as programs do


@pytest.fixture(scope="module")
def differing(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    compare.__module__ = "__main__"  # by value: workers cannot import this module
    first, second = launcher.run(compare, (tmp_path_factory.mktemp("checkpoint"),), num_proc=2)
    assert first == second
    return first


@pytest.mark.parametrize("how", [*DDP_WAYS, "fully_shard", "objects", "again"])
def test_the_same_bits_as_over_gloo(how: str, differing: dict[str, list[str]]) -> None:
    assert differing[how] == []


def lose(context: Context, store: str) -> None:
    """Train until rank 2 is killed; the others hear of it wherever they wait."""
    file = dist.FileStore(store, context.size)
    dist.init_process_group(backend="farandole", store=file, rank=context.rank, world_size=context.size)
    pair = dist.new_group([1, 2])
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    for _ in range(2):  # DDP orders its buckets anew in between
        model(torch.ones(3, 4)).sum().backward()
    wait_for_others(context, 2, Path(store).parent)
    if context.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.all_reduce(torch.ones(2), async_op=True)
    with pytest.raises(PeerLost, match=r"all_reduce of float32\[2\].*rank 2 is lost"):
        work.wait()
    loss = model(torch.ones(3, 4)).sum()
    with pytest.raises(RuntimeError, match="rank 2 is lost"):
        loss.backward()
    if context.rank == 1:
        with pytest.raises(PeerLost, match=r"in process group .*rank 2 is lost"):
            dist.barrier(group=pair)
    dist.destroy_process_group()


def test_a_killed_rank_is_named_on_all_others(tmp_path: Path) -> None:
    run_ranks(3, lose, str(tmp_path / "store"), how="processes", dies={2}, framework="torch")


@pytest.fixture
def torchrun() -> Iterator[list[str]]:
    with ReservedPort() as free:
        words = ["--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(free.port)]
        yield [sys.executable, "-m", "torch.distributed.run", *words]


def test_the_example_below_our_launcher() -> None:
    done = farandole("run", "-np", "2", sys.executable, str(EXAMPLE), timeout=150, framework="torch")
    assert done.returncode == 0, done.stderr
    assert accuracy(done.stdout) > 0.85


def test_the_example_below_torchrun(torchrun: list[str]) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = run([*torchrun, str(EXAMPLE)], env=environment, timeout=150)
    assert done.returncode == 0, done.stderr
    assert accuracy(done.stdout) > 0.85


INIT_AND_GROUP = """
import torch, torch.distributed as dist, farandole.torch as hvd
hvd.init()
one = hvd.allreduce(torch.ones(2) * hvd.rank(), op=hvd.Sum)
dist.init_process_group("farandole")
other = torch.ones(2)
dist.all_reduce(other)
print(f"size {hvd.size()} {one.tolist()} {other.tolist()}\\n", end="", flush=True)  # in one write
dist.destroy_process_group()
"""


def test_init_below_torchrun_beside_a_process_group(torchrun: list[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(INIT_AND_GROUP)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [*torchrun, str(tmp_path / "train.py")]
    done = run(words, env=environment, timeout=150)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["size 2 [1.0, 1.0] [2.0, 2.0]"] * 2


def test_init_beside_a_process_group_without_torchruns_variables(tmp_path: Path) -> None:
    """As below horovodrun: `init_process_group` finds the job without them."""
    (tmp_path / "train.py").write_text(INIT_AND_GROUP)
    done = farandole(
        "run", "-np", "2", "--no-torch-env", sys.executable, str(tmp_path / "train.py"), framework="torch", timeout=150
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] size 2 [1.0, 1.0] [2.0, 2.0]" for rank in range(2)]
    assert "joined a process group" not in done.stderr


SECOND_GROUP = """
import torch, torch.distributed as dist, farandole.torch as hvd
hvd.init()
weight = torch.nn.Parameter(torch.ones(2))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], 0.1), [("weight", weight)])
dist.init_process_group("gloo")
for _ in range(2):
    weight.sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def test_a_second_process_group_is_warned_of_once(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SECOND_GROUP)
    words = ["run", "-np", "2", sys.executable, str(tmp_path / "train.py")]
    done = farandole(*words, framework="torch", timeout=150)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert done.stderr.count(f"rank {rank} trains with farandole, and has joined a process group of gloo") == 1


AS_GLOO = """
import sys, torch, torch.distributed as dist
dist.init_process_group(sys.argv[1])
values = torch.ones(2)
dist.all_reduce(values)
other = dist.new_group([0, 1], backend="gloo")
dist.monitored_barrier(other)
assert dist.get_backend() == sys.argv[1]
assert dist.group.WORLD._get_backend(torch.device("cpu")).size() == 2
words = [*(type(each).__name__ for each in (dist.group.WORLD, other))]
print(f"{' '.join(words)} {values.tolist()}\\n", end="", flush=True)  # in one write
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("asked", "backend"), [(True, "gloo"), (True, "cpu:gloo,cuda:nccl"), (False, "gloo")])
def test_in_place_of_gloo(tmp_path: Path, asked: bool, backend: str) -> None:
    """In new interpreters, because `import torch` decides."""
    (tmp_path / "train.py").write_text(AS_GLOO)
    option = ["--as-gloo"] if asked else []
    done = farandole("run", "-np", "2", *option, sys.executable, str(tmp_path / "train.py"), backend, timeout=150)
    assert done.returncode == 0, done.stderr
    ours = "GlooGroup GlooGroup" if asked else "ProcessGroup ProcessGroup"
    assert done.stdout.count(f" {ours} [2.0, 2.0]") == 2, done.stdout
    assert done.stderr.count("process groups of gloo are farandole's") == asked


def accuracy(output: str) -> float:
    return float(output.partition("with 2 ranks: ")[2].split()[0])


def test_a_reserved_port_is_there_for_who_names_it() -> None:
    with ReservedPort() as reserved, ReservedPort() as other:
        assert reserved.port != other.port
        address = ("127.0.0.1", reserved.port)
        with socket.create_server(address), socket.create_connection(address) as client:
            assert client.getpeername() == address
