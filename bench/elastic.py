"""From kill -9 of a rank to the next step of another one, and how long the others wait when its successor joins.

The contenders run the same training: three ranks, a small model, steps of 20 ms, and may lose one step at most.
farandole's survivors go on in their processes and keep no copies. `torchrun --max-restarts` ends all processes and
starts them again: the program reads the state of the last step from a file. `--torchft PYTHON` adds torchft over gloo,
in a Python that has it; its ranks go on in their processes, too. `--hosts` has farandole's ranks on two hosts instead:
network namespaces with an sshd each, which needs root. There it also cuts a cable. Prints medians, least and most in
seconds, and the ratios of the medians."""

import argparse
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from namespaces import DEVICE, ip

from farandole.config import Config

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from helpers.ssh_hosts import serving_hosts

RANKS = 3
HEARTBEAT = Config().heartbeat.total_seconds()  # without a sign of life, after which a rank on another host is lost
PATIENCE = 300.0  # seconds; torchrun may fail to connect its ranks, and starts them once more
COMMON = """
import os, sys, time, torch
STEPS, FLOATS = int(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
class Model(torch.nn.Linear):
    def __init__(self):
        super().__init__(10, 1)
        self.large = torch.nn.Parameter(torch.ones(FLOATS))  # written to, as models are
    def forward(self, rows):
        return super().forward(rows) + self.large[0] * 0
model = Model()
def loss_of(step, rank):
    rows = torch.rand(32, 10, generator=torch.Generator().manual_seed(1000 * step + rank))
    return torch.nn.functional.mse_loss(model(rows), rows.sum(1, keepdim=True))
def say(step, starts, size):
    print("step", time.monotonic(), os.getpid(), starts, size, step, flush=True)
"""
FARANDOLE = (
    COMMON
    + """
import farandole.torch as hvd
from farandole.torch import elastic
starts = [0]
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
hvd.init()
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
@elastic.run
def train(state):
    while state.step < STEPS:
        optimizer.zero_grad()
        loss_of(state.step, hvd.rank()).backward()
        optimizer.step()
        state.step += 1
        say(state.step, starts[0], hvd.size())
        time.sleep(0.02)
        state.commit()
state = elastic.TorchState(model, optimizer, copies=False, step=0)
def count(): starts[0] += 1
state.register_reset_callbacks([count])
train(state)
"""
)
TORCHRUN = (
    COMMON
    + """
import torch.distributed as dist
dist.init_process_group("gloo")
ddp = torch.nn.parallel.DistributedDataParallel(model)
model = ddp
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
step = 0
if os.path.exists("state.pt"):
    saved = torch.load("state.pt")
    ddp.module.load_state_dict(saved["model"])
    step = saved["step"]
while step < STEPS:
    optimizer.zero_grad()
    loss_of(step, dist.get_rank()).backward()
    optimizer.step()
    step += 1
    say(step, int(os.environ["TORCHELASTIC_RESTART_COUNT"]), dist.get_world_size())
    time.sleep(0.02)
    if dist.get_rank() == 0:
        torch.save({"model": ddp.module.state_dict(), "step": step}, "new.pt")
        os.replace("new.pt", "state.pt")
"""
)
TORCHFT = (
    COMMON
    + """
import torch.distributed as dist
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
local = model
def load(state):
    local.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
def state():
    return {"model": local.state_dict(), "optimizer": optimizer.state_dict()}
manager = Manager(pg=ProcessGroupGloo(), load_state_dict=load, state_dict=state, min_replica_size=1, rank=0,
    world_size=1, store_addr="127.0.0.1", store_port=store.port, replica_id=os.environ["REPLICA"])
ddp = DistributedDataParallel(manager, model)
optimizer = Optimizer(manager, torch.optim.SGD(ddp.parameters(), lr=0.01))
model, step = ddp, 0
while step < STEPS:
    optimizer.zero_grad()
    loss_of(step, int(os.environ["REPLICA"])).backward()
    optimizer.step()
    if manager.current_step() > step:
        step = manager.current_step()
        say(step, 0, manager.num_participants())
    time.sleep(0.02)
"""
)
# Starts a rank anew half a second after its end, as the others' launchers do.
TORCHFT_LAUNCHER = f"""
import os, signal, subprocess, sys, time
from torchft.coordination import LighthouseServer
lighthouse = LighthouseServer("[::]:0", min_replicas=1, join_timeout_ms=1000)
signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
def start(number):
    env = {{**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse.address(), "REPLICA": str(number)}}
    return subprocess.Popen([sys.executable, *sys.argv[1:]], env=env)
ranks = [start(number) for number in range({RANKS})]
while True:
    for number, rank in enumerate(ranks):
        if rank.poll() is not None:
            time.sleep(0.5)
            ranks[number] = start(number)
    time.sleep(0.05)
"""
LINE = re.compile(r"step (\d+\.\d+) (\d+) (\d+) (\d+) (\d+)\n")


@dataclass(frozen=True)
class Step:
    """A finished step of one process."""

    at: float  # seconds of CLOCK_MONOTONIC
    pid: int
    starts: int  # how often the ranks have met again before
    size: int


class Job:
    """One contender's job in a folder."""

    def __init__(self, name: str, words: Sequence[str], program: str, floats: int, folder: Path) -> None:
        (folder / "train.py").write_text(program)
        self._out = folder / "out"
        with self._out.open("wb") as out:
            self._process = subprocess.Popen(
                [*words, "train.py", "1000000", str(floats)],
                cwd=folder,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            )
        self.name = name

    def steps(self) -> list[Step]:
        found = LINE.finditer(self._out.read_text(errors="replace"))
        return [Step(float(each[1]), int(each[2]), int(each[3]), int(each[4])) for each in found]

    def kill_one(self, dice: random.Random) -> float:
        """Kill a rank once all train; return the seconds until the next step of ranks that have met again."""
        return self._time_to_next_step(lambda pids: os.kill(dice.choice(pids), signal.SIGKILL))

    def cut(self, space: str) -> float:
        """Cut the cable of a host once all train; return the seconds until the next step of the others."""
        seconds = self._time_to_next_step(lambda _: ip("-n", space, "link", "set", DEVICE, "down"))
        ip("-n", space, "link", "set", DEVICE, "up")
        return seconds

    def _time_to_next_step(self, strike: Callable[[Sequence[int]], None]) -> float:
        recent = self._wait(_all_train)
        before = {each.pid: each.starts for each in recent}
        began = time.monotonic()
        strike(sorted(before))

        def met_again(steps: list[Step]) -> list[Step]:
            later = [each for each in steps if each.at > began]
            newest = max(before.values())
            return [each for each in later if each.size < RANKS or each.starts > before.get(each.pid, newest)]

        return self._wait(met_again)[0].at - began

    def stalls(self) -> list[float]:
        """Return how long the survivors waited between two steps when a rank joined, less an ordinary step."""
        steps = self.steps()
        gaps: list[float] = []
        ordinary: list[float] = []
        last: dict[int, Step] = {}
        for each in steps:
            before = last.get(each.pid)
            if before is not None:
                (gaps if each.size > before.size else ordinary).append(each.at - before.at)
            last[each.pid] = each
        return [gap - statistics.median(ordinary) for gap in gaps]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)

    def _wait(self, pick: Callable[[list[Step]], list[Step]]) -> list[Step]:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            found = pick(self.steps())
            if found:
                return found
            if self._process.poll() is not None:
                break
            time.sleep(0.01)
        raise RuntimeError(f"{self.name} makes no progress:\n{self._out.read_text(errors='replace')[-3000:]}")


def _all_train(steps: list[Step]) -> list[Step]:
    """Return the last steps if they are those of all ranks."""
    last = steps[-20:]
    whole = len({each.pid for each in last}) == RANKS and all(each.size == RANKS for each in last)
    return last if whole and len(last) == 20 else []


SIZES = ["-np", str(RANKS), "--min-np", "1", "--max-np", str(RANKS), "--blacklist-cooldown-range", "0.5", "0.5"]
RUN = [sys.executable, "-P", "-m"]


def contenders(torchft: str | None) -> Iterator[tuple[str, list[str], str]]:
    yield "farandole", [*RUN, "farandole.launch.cli", "run", *SIZES, sys.executable], FARANDOLE
    restarts = ["--standalone", f"--nproc-per-node={RANKS}", "--max-restarts=1000", "--monitor-interval=0.1"]
    yield "torchrun", [*RUN, "torch.distributed.run", *restarts], TORCHRUN
    if torchft is not None:
        yield "torchft", [torchft, "-c", TORCHFT_LAUNCHER], TORCHFT


def measure_hosts(kills: int, floats: int, dice: random.Random) -> None:
    """Measure two hosts, one of which has two of the ranks."""
    with tempfile.TemporaryDirectory() as folder, serving_hosts(Path(folder)) as hosts:
        first, second = hosts.names
        options = [*SIZES, "-H", f"{first}:2,{second}:1", *hosts.options]
        words = [*RUN, "farandole.launch.cli", "run", *options, sys.executable]
        job = Job("farandole on two hosts", words, FARANDOLE, floats, Path(folder))
        try:
            killed = [job.kill_one(dice) for _ in range(kills)]
            cut = [job.cut(hosts.spaces[1]) - HEARTBEAT for _ in range(min(kills, 5))]
        finally:
            job.close()
        print(f"{job.name}: kill -9 to the next step: {_spread(killed)}; {len(killed)} kills")
        print(f"{job.name}: cut cable to the next step, after the heartbeat: {_spread(cut)}; {len(cut)} cuts")
        print(f"{job.name}: the others wait for a rank that joins: {_spread(job.stalls())}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10, help="of each contender")
    parser.add_argument("--megabytes", type=float, default=1.0, help="of parameters")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--torchft", metavar="PYTHON", help="a Python with torchft, to measure it too")
    parser.add_argument("--only", metavar="NAMES", help="contenders to measure, such as farandole,torchft")
    parser.add_argument("--hosts", action="store_true", help="measure farandole on two hosts instead")
    given = parser.parse_args()
    floats = int(given.megabytes * 1e6 / 4)
    if given.hosts:
        measure_hosts(given.kills, floats, random.Random(given.seed))
        return
    times: dict[str, list[float]] = {}
    stalls: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, words, program in contenders(given.torchft):
            if given.only is not None and name not in given.only.split(","):
                continue
            place = Path(folder, name)
            place.mkdir()
            dice = random.Random(given.seed)
            job = Job(name, words, program, floats, place)
            times[name] = []
            try:
                for _ in range(given.kills):
                    times[name].append(job.kill_one(dice))
            except RuntimeError as error:
                print(error)
            finally:
                stalls[name] = job.stalls()
                job.close()
    times = {name: seconds for name, seconds in times.items() if seconds}
    for name, seconds in times.items():
        print(f"{name}: kill -9 to the next step: {_spread(seconds)}; {len(seconds)} kills of {given.kills}")
        if stalls[name]:
            print(f"{name}: the others wait for a rank that joins: {_spread(stalls[name])}")
    for name in times.keys() - {"farandole"} if "farandole" in times else ():
        ratio = statistics.median(times[name]) / statistics.median(times["farandole"])
        print(f"{name} / farandole: {ratio:.1f}")


def _spread(seconds: Sequence[float]) -> str:
    return f"median {statistics.median(seconds):.3f} s (least {min(seconds):.3f}, most {max(seconds):.3f})"


if __name__ == "__main__":
    main()
