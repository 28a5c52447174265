"""The command lines of Horovod's documentation, unchanged: each does what it says, or is refused with the remedy."""

import contextlib
import logging
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import pytest

from farandole.compat.horovodrun import run_commandline
from farandole.compat.mpirun import main as mpirun
from farandole.config import Config
from farandole.launch import cli
from farandole.launch import mpirun as site_mpirun
from farandole.launch.backend import Backend, Command, Host, Shell
from farandole.launch.elastic import options
from farandole.launch.elastic.hosts import HostDiscovery
from farandole.launch.elastic.joining import Record
from farandole.launch.elastic.roster import Limits
from farandole.launch.mpirun import Asked, Launcher, command_of

FOUR = "server1:4,server2:4,server3:4,server4:4"
OPEN_MPI = "-bind-to none -map-by slot -x NCCL_DEBUG=INFO -x LD_LIBRARY_PATH -x PATH -mca pml ob1 -mca btl ^openib"
PORT = '-mca plm_rsh_args "-p 12345"'
DISCOVERY = "--host-discovery-script discover_hosts.sh"
BENCHMARK = "scripts/tf_cnn_benchmarks/tf_cnn_benchmarks.py --model resnet101 --batch_size 64 --variable_update horovod"
WARMUP = "--autotune-warmup-samples 5 --autotune-steps-per-sample 20 --autotune-bayes-opt-max-samples 40"
EXCLUDED = "-x NCCL_SOCKET_IFNAME=^lo,docker0 -mca btl_tcp_if_exclude lo,docker0"
FILES = {
    "myhostfile": "aa slots=2\nbb slots=2\ncc slots=2\n",
    "hosts": "node1\nnode2\n",
    "discover_hosts.sh": "#!/bin/sh\necho host-1:4\necho host-2:4\necho host-3:4\n",
    "horovod.yaml": "controller: gloo\nparams:\n  fusion_threshold_mb: 32\nautotune:\n  enabled: true\n",
    "only_names.sh": "#!/bin/sh\necho host-1\necho host-2\n",
}


@dataclass(frozen=True, kw_only=True)
class Does:
    """What becomes of a line: its ranks and their hosts, settings and variables, words of a warning."""

    ranks: int = 4
    hosts: str = ""  # none: this machine, by a slot for each rank
    port: str = ""  # of the hosts' ssh servers
    settings: Mapping[str, object] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    warns: str = ""
    limits: str = ""  # of an elastic job
    by_mpirun: str = ""  # words of the command of Open MPI's mpirun, which starts the ranks


@dataclass(frozen=True)
class Refused:
    """The sentence that ends the command."""

    sentence: str


TRACED = "HOROVOD_TIMELINE=/path/to/timeline.json"
MARKED = "HOROVOD_TIMELINE_MARK_CYCLES=1"
PROFILED = Does(settings={"timeline": "/path/to/timeline.json", "timeline_mark_cycles": True})
FUSED = {"fusion_threshold": 33554432}
TUNED = {"autotune": True, "autotune_log": "/tmp/autotune_log.csv"}
NO_CYCLE = "the engine wakes by event, there is no cycle"
FOUND = "host-1:4,host-2:4,host-3:4"
LINES: Mapping[str, Does | Refused] = {
    "horovodrun -np 4 python train.py": Does(),
    "horovodrun -np 4 -H localhost:4 python train.py": Does(),
    f"horovodrun -np 16 -H {FOUR} python train.py": Does(ranks=16, hosts=FOUR),
    "horovodrun -np 6 -hostfile myhostfile python train.py": Does(ranks=6, hosts="aa:2,bb:2,cc:2"),
    "horovodrun -np 16 -H host1:4,host2:4,host3:4,host4:4 -p 12345 python keras_mnist_advanced.py": Does(
        ranks=16, hosts="host1:4,host2:4,host3:4,host4:4", port="12345"
    ),
    f"horovodrun -np 16 -H {FOUR} python {BENCHMARK}": Does(ranks=16, hosts=FOUR),
    f"horovodrun -np 16 -H {FOUR} python {BENCHMARK} --data_dir /path --data_name imagenet --num_batches=2000": Does(
        ranks=16, hosts=FOUR
    ),
    "horovodrun -np 8 -H host1:4,host2:4 python keras_mnist_advanced.py": Does(ranks=8, hosts="host1:4,host2:4"),
    "horovodrun -np 2 --hosts gpu-node-1:1,gpu-node-2:1 python tensorflow2_mnist_data_service.py /c.json": Does(
        ranks=2, hosts="gpu-node-1:1,gpu-node-2:1"
    ),
    "horovodrun --gloo -np 2 python train.py": Does(ranks=2),
    "horovodrun -np 2 -H localhost:2 --gloo python pytorch/pytorch_mnist.py --epochs 1": Does(ranks=2),
    "horovodrun --gloo-timeout-seconds 600 -np 2 python train.py": Does(
        ranks=2, warns="--gloo-timeout-seconds has no effect: see --collective-timeout and --start-timeout"
    ),
    "horovodrun -np 2 --mpi python train.py": Does(ranks=2, by_mpirun="--bind-to none --map-by slot"),
    f'horovodrun -np 16 -H {FOUR} --mpi-args="-x NCCL_DEBUG=INFO" python train.py': Does(
        ranks=16, hosts=FOUR, by_mpirun="--bind-to none --map-by slot -x NCCL_DEBUG=INFO"
    ),
    'horovodrun -np 6 --mpi-args="-gpu" python train.py': Does(ranks=6, by_mpirun="-gpu"),
    'horovodrun --mpi --binding-args="-bind-to socket -map-by socket" -np 4 python train.py': Does(
        by_mpirun="-bind-to socket -map-by socket"
    ),
    f"horovodrun --mpi --tcp -p 12345 -np 16 -H {FOUR} python train.py": Does(
        ranks=16, hosts=FOUR, port="12345", by_mpirun="--mca pml ob1"
    ),
    # The launcher's other options, as its help has them
    "horovodrun --start-timeout 600 -np 4 python train.py": Does(settings={"start_timeout": timedelta(minutes=10)}),
    "horovodrun --network-interfaces eth0,eth1 -np 4 python train.py": Does(settings={"interface": "eth0,eth1"}),
    "horovodrun --network-interface eth0 -np 4 python train.py": Does(settings={"interface": "eth0"}),
    "horovodrun --disable-cache -np 4 python train.py": Does(warns="--disable-cache has no effect"),
    "horovodrun --log-level DEBUG --verbose -np 4 python train.py": Does(settings={"log_level": "debug"}),
    "HOROVOD_LOG_LEVEL=DEBUG horovodrun -np 4 python train.py": Does(settings={"log_level": "debug"}),
    "horovodrun -np 2 --stall-check-warning-time-seconds 30 --stall-check-shutdown-time-seconds 120 python t.py": Does(
        ranks=2, settings={"stall_check_time": timedelta(seconds=30), "stall_shutdown_time": timedelta(seconds=120)}
    ),
    "horovodrun -np 4 --no-stall-check python train.py": Does(settings={"stall_check_disable": True}),
    "horovodrun -np 4 --config-file horovod.yaml python train.py": Does(settings=FUSED | {"autotune": True}),
    "horovodrun -np 4 --hierarchical-allreduce python train.py": Does(warns="--hierarchical-allreduce has no effect"),
    "horovodrun -np 4 --num-nccl-streams 2 python train.py": Does(warns="--num-nccl-streams has no effect"),
    "HOROVOD_HIERARCHICAL_ALLREDUCE=1 horovodrun -np 4 python train.py": Does(
        warns="HOROVOD_HIERARCHICAL_ALLREDUCE (the algorithm is chosen by size and topology)"
    ),
    "HOROVOD_DYNAMIC_PROCESS_SETS=1 horovodrun -np 4 python train.py": Does(),
    "HOROVOD_ENABLE_XLA_OPS=1 horovodrun -np 4 python train.py": Does(warns="HOROVOD_ENABLE_XLA_OPS"),
    "HOROVOD_CPU_OPERATIONS=CCL horovodrun -np 4 python train.py": Refused(
        "HOROVOD_CPU_OPERATIONS: unknown fabric 'CCL'; use one of auto, tcp, mpi"
    ),
    "HOROVOD_THREAD_AFFINITY=53,71 horovodrun -np 4 python train.py": Does(warns="HOROVOD_THREAD_AFFINITY"),
    "HOROVOD_CCL_CACHE=1 horovodrun -np 4 python train.py": Does(warns="HOROVOD_CCL_CACHE (oneCCL is not used)"),
    # Fusion, the timeline, tuning
    "HOROVOD_FUSION_THRESHOLD=33554432 horovodrun -np 4 python train.py": Does(settings=FUSED),
    "HOROVOD_FUSION_THRESHOLD=0 horovodrun -np 4 python train.py": Does(settings={"fusion_threshold": 0}),
    "HOROVOD_CYCLE_TIME=3.5 horovodrun -np 4 python train.py": Does(warns=f"HOROVOD_CYCLE_TIME ({NO_CYCLE})"),
    "horovodrun -np 4 --fusion-threshold-mb 32 --cycle-time-ms 3.5 python train.py": Does(
        settings=FUSED, warns=f"--cycle-time-ms has no effect: {NO_CYCLE}"
    ),
    f"{TRACED} horovodrun -np 4 python train.py": Does(settings={"timeline": "/path/to/timeline.json"}),
    f"{TRACED} {MARKED} horovodrun -np 4 python train.py": PROFILED,
    "horovodrun -np 4 --timeline-filename /path/to/timeline.json --timeline-mark-cycles python train.py": PROFILED,
    "horovodrun -np 4 --autotune python train.py": Does(settings={"autotune": True}),
    "horovodrun -np 4 --autotune --autotune-log-file /tmp/autotune_log.csv python train.py": Does(settings=TUNED),
    "horovodrun -np 4 --autotune --cache-capacity 1024 --no-hierarchical-allgather python train.py": Does(
        settings={"autotune": True, "cache_capacity": 1024},
        warns="--no-hierarchical-allgather has no effect: the algorithm is chosen by size and topology",
    ),
    f"horovodrun -np 4 --autotune {WARMUP} python train.py": Does(
        settings={
            "autotune": True,
            "autotune_warmup_samples": 5,
            "autotune_steps_per_sample": 20,
            "autotune_max_samples": 40,
        }
    ),
    "horovodrun -np 4 --autotune --autotune-gaussian-process-noise 0.75 python train.py": Does(
        settings={"autotune": True}, warns="--autotune-gaussian-process-noise has no effect"
    ),
    # Hosts that a script names
    f"horovodrun -np 8 {DISCOVERY} python train.py": Does(ranks=8, hosts=FOUND),
    f"horovodrun -np 8 {DISCOVERY} --slots 4 python train.py": Does(ranks=8, hosts=FOUND),
    "horovodrun -np 8 --host-discovery-script only_names.sh --slots 4 python train.py": Does(
        ranks=8, hosts="host-1:4,host-2:4"
    ),
    f"horovodrun -np 8 --slots-per-host 4 --elastic-timeout 60 {DISCOVERY} python train.py": Does(
        ranks=8, hosts=FOUND, settings={"elastic_timeout": timedelta(seconds=60)}
    ),
    f"horovodrun -np 8 --min-np 8 --max-num-proc 8 {DISCOVERY} python train.py": Does(ranks=8, hosts=FOUND),
    "horovodrun -np 8 --host-discovery-script ./discover_hosts.sh python elastic.py": Does(ranks=8, hosts=FOUND),
    f"horovodrun -np 8 --min-np 4 --max-np 12 {DISCOVERY} python train.py": Does(
        ranks=8, hosts=FOUND, limits="min_np 4 max_np 12"
    ),
    f"horovodrun -np 8 {DISCOVERY} --reset-limit 3 python train.py": Does(ranks=8, hosts=FOUND, limits="resets 3"),
    f"horovodrun -np 8 --blacklist-cooldown-range 10 100 {DISCOVERY} python train.py": Does(
        ranks=8, hosts=FOUND, limits="cooldown 10 100"
    ),
    "horovodrun -np 2 --min-np 4 python train.py": Refused("num_proc: is 2, and must lie between min_np 4"),
    f"horovodrun --mpi -np 8 {DISCOVERY} python train.py": Refused("mpirun ends all ranks when one is lost"),
    # Jobs of LSF, where Horovod counted the GPUs
    "horovodrun python train.py": Refused("the number of ranks is missing: -np N"),
    'horovodrun --mpi-args="-gpu" python train.py': Refused("the number of ranks is missing: -np N"),
    "horovodrun --jsrun -np 6 python train.py": Refused("by ssh, not by jsrun; name the job's hosts with -H"),
    "LSB_MCPU_HOSTS='other1 4 other2 4' horovodrun -np 6 python train.py": Refused(
        "say which of these hosts to use: -H other1:4,other2:4, or -H localhost:N for this one"
    ),
    # Open MPI's and Intel's mpirun, below the stand-in of that name, which needs no MPI
    f"mpirun -np 4 {OPEN_MPI} python train.py": Does(variables={"NCCL_DEBUG": "INFO"}),
    f"mpirun --allow-run-as-root {OPEN_MPI} -np 4 python train.py": Does(variables={"NCCL_DEBUG": "INFO"}),
    f"mpirun -np 16 -H {FOUR} {OPEN_MPI} python train.py": Does(ranks=16, hosts=FOUR),
    f"mpirun -np 16 -H {FOUR} {PORT} {OPEN_MPI} python train.py": Does(ranks=16, hosts=FOUR, port="12345"),
    f"mpirun -np 16 -H {FOUR} -x HOROVOD_MPI_THREADS_DISABLE=1 -mca pml ob1 python train.py": Does(
        ranks=16, hosts=FOUR, warns="HOROVOD_MPI_THREADS_DISABLE (the fabric 'mpi' calls MPI from several threads)"
    ),
    f"mpirun -np 16 -H {FOUR} {OPEN_MPI} {EXCLUDED} python train.py": Does(
        ranks=16, hosts=FOUR, variables={"NCCL_SOCKET_IFNAME": "^lo,docker0"}
    ),
    "mpirun -x HOROVOD_FUSION_THRESHOLD=33554432 -x HOROVOD_CYCLE_TIME=3.5 -np 4 python train.py": Does(
        settings=FUSED, warns=NO_CYCLE
    ),
    f"mpirun -x {TRACED} -x {MARKED} -np 4 python train.py": PROFILED,
    "mpirun -x HOROVOD_AUTOTUNE=1 -x HOROVOD_AUTOTUNE_LOG=/tmp/autotune_log.csv -np 4 python train.py": Does(
        settings=TUNED
    ),
    "mpirun -x HOROVOD_AUTOTUNE=1 python train.py": Refused("the number of ranks is missing: -np N"),
    "mpirun -n 4 -ppn 2 -hostfile hosts python ./run_example.py": Refused(
        "-ppn is not known here; write the ranks of each host behind its name: -H host:2, or 'host slots=2' in the file"
    ),
}


@dataclass
class Started:
    """What the launcher would have started."""

    ranks: int
    environment: Mapping[str, str]
    hosts: Sequence[Host]
    shell: Shell | None  # none: this machine alone
    command: list[str] = field(default_factory=list)
    mpirun: str = ""  # the command line that would have become of this process
    limits: Limits | None = None  # of an elastic job

    def run(self, task: Command, output: object) -> None:
        self.command = list(task.words)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    return tmp_path


@pytest.fixture
def started(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Started]]:
    """Jobs that were to be started; none is."""
    jobs: list[Started] = []

    @contextlib.contextmanager
    def open_nothing(
        ranks: int, environment: Mapping[str, str], *, backend: Backend, binding: str
    ) -> Iterator[Started]:
        jobs.append(Started(ranks, environment, backend.hosts, getattr(backend, "_shell", None)))
        yield jobs[-1]

    @contextlib.contextmanager
    def open_no_members(
        limits: Limits,
        discovery: HostDiscovery,
        backend_of: Callable[[Host], Backend],
        environment: Mapping[str, str],
        record: Record | None,
    ) -> Iterator[Started]:
        hosts = [Host(name, slots) for name, slots in discovery.find_available_hosts_and_slots().items()]
        jobs.append(
            Started(limits.wanted, environment, hosts, getattr(backend_of(hosts[0]), "_shell", None), limits=limits)
        )
        yield jobs[-1]

    def run_nothing(asked: Asked, words: Sequence[str], environment: Mapping[str, str], fabric: str) -> NoReturn:
        command, _ = command_of(Launcher("/bin/mpirun", "mpirun", "Open MPI", 4), asked, words, environment)
        jobs.append(Started(asked.ranks, environment, asked.hosts, asked.ssh, list(words), shlex.join(command)))
        raise SystemExit(0)  # the real one does not return

    monkeypatch.setattr(cli, "open_job", open_nothing)
    monkeypatch.setattr(options, "open_elastic_job", open_no_members)
    monkeypatch.setattr(site_mpirun, "become_mpirun", run_nothing)
    for module in ("cli", "backends", "backends.lsf", "backends.slurm"):
        monkeypatch.setattr(
            f"farandole.launch.{module}.is_local", lambda name: name == "localhost"
        )  # no name is looked up
    monkeypatch.setattr("signal.signal", lambda number, handler: handler)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield jobs
    root.handlers[:], root.level = handlers, level


def words_of(line: str) -> tuple[dict[str, str], str, list[str]]:
    """Return the variables before the command, the command and its words."""
    words = shlex.split(line)
    variables = {}
    while "=" in words[0]:
        name, _, variables[name] = words.pop(0).partition("=")
    return variables, words[0], words[1:]


@pytest.mark.parametrize("line", LINES)
def test_each_line_does_what_it_says_or_is_refused(
    line: str,
    started: list[Started],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    variables, program, words = words_of(line)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    try:
        code = (run_commandline if program == "horovodrun" else mpirun)(words)
    except SystemExit as end:
        code = int(end.code or 0)
    said = caplog.text + capsys.readouterr().err
    expected = LINES[line]
    if isinstance(expected, Refused):
        assert (code, started) == (2, [])
        assert expected.sentence in said
        return
    assert code == 0, said
    (job,) = started
    assert job.ranks == expected.ranks
    assert job.command == words[words.index("python") :]
    hosts = ",".join(f"{host.name}:{host.slots}" for host in job.hosts)
    assert hosts == (expected.hosts or f"localhost:{expected.ranks}")
    if job.limits is not None:
        said_limits = f"min_np {job.limits.least} max_np {job.limits.most} resets {job.limits.resets} cooldown "
        said_limits += " ".join(f"{each:g}" for each in job.limits.cooldown)
        assert expected.limits in said_limits
    assert (job.limits is not None) == any(
        word in words for word in ("--host-discovery-script", "--min-np", "--max-np")
    )
    assert bool(job.mpirun) == bool(expected.by_mpirun)
    assert f" {expected.by_mpirun} " in job.mpirun or not job.mpirun
    if expected.hosts:
        assert job.shell is not None
        shell = job.shell.words("host", "true")
        assert ([shell[shell.index("-p") + 1]] if "-p" in shell else []) == expected.port.split()
    assert "PATH" in job.environment and {**job.environment, **expected.variables} == job.environment
    assert expected.warns in said and bool(expected.warns) == ("no effect" in said)
    without_torch = {"FARANDOLE_TORCH_ENV": "no"}  # the default of both commands
    given, default = Config.from_environment(job.environment), Config.from_environment(without_torch)
    changed = {each.name for each in Config.settings() if getattr(given, each.name) != getattr(default, each.name)}
    assert {name: getattr(given, name) for name in changed} == expected.settings


@pytest.mark.parametrize(
    "line", ["horovodrun -np 4 -H localhost:4 python train.py", *(each for each in LINES if "-np 4 -bind" in each)]
)
def test_lines_that_are_really_run(line: str, folder: Path) -> None:
    (folder / "train.py").write_text("import os\nprint(os.environ['HOROVOD_RANK'], os.environ['HOROVOD_SIZE'])\n")
    _, program, words = words_of(line)
    command = [sys.executable, "-m", f"farandole.compat.{program}", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    prefix = "[{0}]<stdout>:{0} 4" if program == "horovodrun" else "[{0}] {0} 4"
    assert sorted(done.stdout.splitlines()) == [prefix.format(rank) for rank in range(4)]
