"""Random schedules of what may happen to an elastic job, and a job that is followed through one of them.

Ranks are killed, stopped, and fail in their code, newcomers end before they train; agents and the launcher are killed
or stopped; hosts come, go and are cut off, or cannot be found; a launcher takes the job over. One rank, the keeper, is
left alone until another one trains: without any rank that has the state a job ends. Each rank notes each step in one
file, with a number that has all steps before in it."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

from namespaces import DEVICE, ip

from helpers.ssh_hosts import Hosts
from system.elastic_training import is_alive
from system.launched import PATIENCE, command, parent_of

# Each row of an epoch counts once, in the step to which it belongs whatever the number of ranks is.
PROGRAM = """
import faulthandler, os, random, signal, sys, time
if os.path.exists("leave"):
    sys.exit(random.choice([0, 3]))
import numpy as np
import farandole.numpy as hvd
from farandole import elastic
from farandole.data import Loader, ParquetSource

loader = Loader(ParquetSource("rows.parquet"), batch_size=7, of_all_ranks=True, policy="join")
steps, slot = os.open("steps", os.O_WRONLY | os.O_APPEND), int(os.environ["HOROVOD_LOCAL_RANK"])
faulthandler.register(signal.SIGUSR1, open("stacks", "a"))
hvd.init()
loader.resize(hvd.rank(), hvd.size())

@elastic.run
def train(state):
    while not state.over:
        for batch in state.loader:
            mine = np.array([(batch["x"] ** 2).sum(), len(batch["x"]), os.path.exists("end")], np.int64)
            rows, count, over = hvd.allreduce(mine, op=hvd.Sum)
            state.weight = (state.weight * 31 + int(rows) * 8 + int(count)) % 1_000_000_007
            state.step += 1
            state.over = bool(over)
            os.write(steps, b"%d %d %d %d %d\\n" % (state.step, hvd.size(), os.getpid(), state.weight, slot))
            time.sleep(0.005)
            state.commit()
            if state.over:
                break

train(elastic.ObjectState(step=0, weight=0, over=False, loader=loader))
os.write(steps, b"done %d\\n" % os.getpid())
"""
ROWS = 100
FATAL = (signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGSTOP)
LAUNCHERS = ("launcher stops", "launcher", "successor")
AT_ONE = ("ranks", "ranks", "join", *LAUNCHERS, "keeper", "guard", "pause", "newcomers leave", "discovery fails")
AT_HOSTS = (*AT_ONE, "agent", "agent stops", "cut", "host goes")


def expected_weights(folder: Path, steps: int) -> list[int]:
    """Return the weight after each number of steps of one rank that nothing disturbs."""
    from farandole.data import Loader, ParquetSource

    loader = Loader(ParquetSource(folder / "rows.parquet"), batch_size=7, of_all_ranks=True, policy="join")
    weights, seen = [0], 0
    while len(weights) <= steps:
        for batch in loader:
            rows = int((batch["x"] ** 2).sum()) * 8 + len(batch["x"])
            weights.append((weights[-1] * 31 + rows) % 1_000_000_007)
            seen += len(batch["x"])
        assert seen == loader.epoch * ROWS
    return weights


@dataclass(frozen=True, slots=True)
class Schedule:
    """Events in the job of one seed, each followed by a pause."""

    seed: int
    events: Sequence[tuple[str, float]]

    @classmethod
    def draw(cls, seed: int, on_hosts: bool) -> "Schedule":
        dice = random.Random(seed)
        kinds = AT_HOSTS if on_hosts else AT_ONE
        return cls(seed, [(dice.choice(kinds), dice.choice([0.0, 0.02, 0.1, 0.4])) for _ in range(dice.randint(3, 7))])


@dataclass(frozen=True, slots=True)
class Step:
    number: int
    size: int
    pid: int
    weight: int
    slot: int


@dataclass
class Followed:
    """The job of a schedule, in a folder."""

    folder: Path
    dice: random.Random
    hosts: Hosts | None
    launchers: "list[subprocess.Popen[bytes]]" = field(default_factory=list)
    story: list[str] = field(default_factory=list)
    keeper: int = 0
    keepers_slot: int = 0
    slots: int = 3
    later: list[Callable[[], None]] = field(default_factory=list)  # what ends an event that lasts
    harmed: set[int] = field(default_factory=set)

    # --- the job

    def start(self) -> None:
        (self.folder / "train.py").write_text(PROGRAM)
        (self.folder / "steps").touch()
        self.offer(3)
        self.launch("--survive-launcher")
        self.wait(lambda: bool(self.trains(0)), "the first step")
        self.change_keeper()

    def launch(self, *options: str) -> None:
        """Start a launcher of the job."""
        words = ["-np", "2", "--min-np", "1", "--max-np", "3", "--host-discovery-script", str(self.folder / "hosts.sh")]
        words += ["--blacklist-cooldown-range", "0.1", "0.2", "--heartbeat", "1", "--elastic-timeout", "20"]
        words += [] if self.hosts is None else self.hosts.options
        with (self.folder / "output").open("ab") as out:
            self.launchers.append(
                subprocess.Popen(
                    [*command("run"), "--verbose", *words, *options, sys.executable, "train.py"],
                    cwd=self.folder,
                    env={**os.environ, "HOME": str(self.folder / "home")},
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def offer(self, slots: int) -> None:
        """Offer so many slots, one on each host; without hosts all on this machine."""
        self.slots, lines = slots, [f"localhost:{slots}"]
        if self.hosts is not None:
            lines = ["localhost:1", *(f"{name}:1" for name in self.hosts.names)][:slots]
        self.discover("".join(f"echo {line}\n" for line in lines))

    def discover(self, script: str) -> None:
        (self.folder / "new").write_text(script)
        (self.folder / "new").rename(self.folder / "hosts.sh")

    @property
    def has_launcher(self) -> bool:
        return self.launchers[-1].poll() is None

    # --- what it does

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text()

    def steps(self) -> list[Step]:
        lines = (self.folder / "steps").read_text().splitlines()
        return [Step(*map(int, line.split())) for line in lines if not line.startswith("done")]

    def trains(self, since: int) -> set[int]:
        """The processes that have finished steps after the first `since` ones."""
        return {step.pid for step in self.steps()[since:]} - self.harmed

    def wait(self, what: Callable[[], bool], why: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not what():
            assert time.monotonic() < deadline, f"{why}: not within {PATIENCE} s"
            time.sleep(0.01)

    def change_keeper(self) -> None:
        """Choose a rank of this machine that has just finished steps as the next keeper."""
        self.end_events()
        since = len(self.steps())
        self.wait(lambda: len(self.steps()) >= since + 9, "steps go on")
        late = {step.pid: step.slot for step in self.steps()[since:] if step.pid not in self.harmed}
        # One that does not leave when its slot goes.
        chosen = [pid for pid in sorted(late) if late[pid] < self.slots and not self.is_remote(pid)]
        self.keeper = self.dice.choice(chosen)
        self.keepers_slot = late[self.keeper]

    def is_remote(self, pid: int) -> bool:
        if self.hosts is None or not is_alive(pid):
            return False
        return os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net")

    # --- events

    def happen(self, event: str) -> None:
        self.story.append(f"{time.monotonic() % 1000:.2f} s: {event} after {len(self.steps())} lines")
        getattr(self, "do_" + event.replace(" ", "_"))()

    def victims(self) -> list[int]:
        others = sorted(pid for pid in self.trains(-30) if pid != self.keeper and is_alive(pid))
        return self.dice.sample(others, self.dice.randint(1, len(others))) if others else []

    def do_ranks(self) -> None:
        for pid in self.victims():
            # Without a launcher a stopped rank that is alone on its host counts as cut off.
            self.harm(pid, self.dice.choice(FATAL if self.has_launcher or self.hosts is None else FATAL[:3]))

    def do_guard(self) -> None:
        for pid in self.victims():
            self.harm(parent_of(pid), signal.SIGKILL)
            self.harmed.add(pid)

    def do_pause(self) -> None:
        """Stop ranks for a while, which may be short enough for nobody to give them up."""
        for pid in self.victims() if self.has_launcher or self.hosts is None else ():
            self.harm(pid, signal.SIGSTOP)
            self.later.append(partial(self.harm, pid, signal.SIGCONT))

    def do_newcomers_leave(self) -> None:
        """Let the programs of newcomers end at once, well or not."""
        (self.folder / "leave").touch()
        self.later.append(partial((self.folder / "leave").unlink, missing_ok=True))

    def do_discovery_fails(self) -> None:
        self.discover("exit 1\n")
        self.later.append(lambda: self.offer(self.slots))

    def harm(self, pid: int, number: signal.Signals) -> None:
        self.story.append(f"{number.name} to {pid}")
        self.harmed.add(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def do_keeper(self) -> None:
        self.change_keeper()
        self.story.append(f"the keeper is {self.keeper}")

    def do_join(self) -> None:
        self.offer(self.dice.randint(self.keepers_slot + 1, 3) if self.hosts is None else 3)

    def do_host_goes(self) -> None:
        self.offer(self.dice.choice([1, 2]))

    def do_launcher(self) -> None:
        """Kill the launcher."""
        self.launchers[-1].kill()
        self.launchers[-1].wait()

    def do_launcher_stops(self) -> None:
        if self.has_launcher:
            launcher = self.launchers[-1]
            launcher.send_signal(signal.SIGSTOP)
            self.later.append(partial(launcher.send_signal, signal.SIGCONT))

    def do_successor(self) -> None:
        if not self.has_launcher:
            self.offer(self.slots)  # it begins with a discovery that works
            self.launch("--join", "last")

    def do_agent(self, number: signal.Signals = signal.SIGKILL) -> None:
        remote = [pid for pid in sorted(self.trains(-30)) if self.is_remote(pid)]
        if remote:
            pid = self.dice.choice(remote)
            with contextlib.suppress(FileNotFoundError):  # the rank has ended meanwhile
                agent = parent_of(parent_of(pid))
                self.harm(agent, number)
                if number is signal.SIGKILL:
                    self.harmed.add(pid)
                else:
                    self.later.append(partial(self.harm, agent, signal.SIGCONT))

    def do_agent_stops(self) -> None:
        self.do_agent(signal.SIGSTOP)

    def do_cut(self) -> None:
        assert self.hosts is not None
        space = self.dice.choice(self.hosts.spaces[:2])
        ip("-n", space, "link", "set", DEVICE, "down")
        self.later.append(partial(ip, "-n", space, "link", "set", DEVICE, "up"))

    def end_events(self) -> None:
        """End some events that last."""
        for end in self.later:
            end()
        self.later.clear()

    # --- the end

    def finish(self) -> None:
        """End the training, and check what all ranks have noted."""
        self.end_events()
        since = len(self.steps())
        self.wait(lambda: len([each for each in self.steps()[since:] if each.pid == self.keeper]) > 5, "steps go on")
        (self.folder / "end").touch()
        self.wait(lambda: not is_alive(self.keeper), "the keeper ends")
        if self.has_launcher:
            assert self.launchers[-1].wait(PATIENCE) == 0
        pids = {step.pid for step in self.steps()}
        self.wait(lambda: not any(map(is_alive, pids)), "all ranks end")
        self.check()

    def check(self) -> None:
        steps = self.steps()
        weights = expected_weights(self.folder, max(step.number for step in steps))
        for step in steps:
            assert step.weight == weights[step.number], f"{step} differs from an undisturbed training"
        assert f"done {self.keeper}\n" in (self.folder / "steps").read_text()
        mine = [step.number for step in steps if step.pid == self.keeper]
        assert all(later - before in (0, 1, 2) for before, later in pairwise(mine)), mine

    def report(self) -> str:
        """The end of all output, and where the keeper is."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.keeper or os.getpid(), signal.SIGUSR1 if self.keeper else 0)
            time.sleep(0.5)
        lines = (self.folder / "steps").read_text().splitlines()
        logs = [file for file in (self.folder / "home").glob("**/[0-9]*") if file.is_file()]
        tails = [f"{file.name}: {file.read_text()[-1500:]}" for file in logs]
        stacks = (self.folder / "stacks").read_text() if (self.folder / "stacks").exists() else ""
        return "\n".join([*self.story, stacks[-4000:], *lines[-15:], self.output[-5000:], *tails])

    def close(self) -> None:
        """End all processes."""
        with contextlib.suppress(subprocess.CalledProcessError):
            self.end_events()
        (self.folder / "end").touch()
        for launcher in self.launchers:
            launcher.kill()
            launcher.wait()
        for pid in {step.pid for step in self.steps()}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for name in (self.folder / "home/.local/state/farandole").glob("*"):
            shutil.rmtree(Path("~/.local/state/farandole", name.name).expanduser(), ignore_errors=True)


@contextlib.contextmanager
def _job(folder: Path, seed: int, hosts: Hosts | None) -> Iterator[Followed]:
    job = Followed(folder, random.Random(seed), hosts)
    try:
        yield job
    except (AssertionError, subprocess.TimeoutExpired, StopIteration) as error:
        raise AssertionError(f"FARANDOLE_TEST_SEED={seed}: {error}\n{job.report()}") from error
    finally:
        job.close()


def follow(folder: Path, seed: int, hosts: Hosts | None = None) -> None:
    """Run a job through the schedule of `seed`, on this machine, or on it and `hosts`."""
    schedule = Schedule.draw(seed, hosts is not None)
    with _job(folder, seed, hosts) as job:
        job.start()
        for event, pause in schedule.events:
            job.happen(event)
            time.sleep(pause)
            if job.dice.random() < 0.5:
                job.end_events()
        job.finish()
