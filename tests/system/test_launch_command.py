"""`farandole run` from outside: ranks, output, failures, endings."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from farandole.cores import available_cores
from system.launched import PATIENCE, REAPED, command, farandole, launched

# Each rank and a daemon of it in a session of its own leave their process ids; then the rank sleeps.
SLEEPERS = """
import os, subprocess, time
rank = os.environ["FARANDOLE_RANK"]
def note(name, pid):
    with open(f"{name}.{rank}", "w") as file:
        print(pid, file=file)
note("daemon", subprocess.Popen(["sleep", "1000"], start_new_session=True).pid)
note("rank", os.getpid())
time.sleep(1000)
"""


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_and_their_variables(size: int) -> None:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    script = " ".join(f"$FARANDOLE_{name}=$HOROVOD_{name}" for name in names)
    done = farandole("run", "-np", str(size), "sh", "-c", f"echo {script} $PYTHONUNBUFFERED $MINE", env={"MINE": "x"})
    assert (done.returncode, done.stderr) == (0, "")
    expected = [f"[{r}] {r}={r} {size}={size} {r}={r} {size}={size} 0=0 1=1 1 x" for r in range(size)]
    assert sorted(done.stdout.splitlines()) == expected


@pytest.mark.parametrize("options", [(), ("--min-np", "2")], ids=["fixed", "elastic"])
def test_programs_of_horovod_find_the_name_of_their_host(options: tuple[str, ...]) -> None:
    # Apple's pfl, for example, trains on each rank alone without it.
    hosts = ("-np", "2", "-H", "localhost:2")
    done = farandole(
        "run", *hosts, *options, "sh", "-c", "echo host=$HOROVOD_HOSTNAME", env={"HOROVOD_HOSTNAME": "old"}
    )
    assert sorted(re.findall(r"host=.*", done.stdout)) == ["host=localhost"] * 2


def test_streams_timestamps_and_files(tmp_path: Path) -> None:
    options = ("--output-filename", str(tmp_path), "--prefix-output-with-timestamp")
    done = farandole("run", "-np", "2", *options, "sh", "-c", "echo out; echo err >&2")
    assert done.returncode == 0
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}"
    for shown, word in ((done.stdout, "out"), (done.stderr, "err")):
        assert sorted(re.findall(rf"^{stamp} \[(\d)\] {word}$", shown, re.MULTILINE)) == ["0", "1"]
        assert len(shown.splitlines()) == 2
    assert re.fullmatch(rf"{stamp} out\n", (tmp_path / "rank.1" / "stdout").read_text())
    assert re.fullmatch(rf"{stamp} err\n", (tmp_path / "rank.0" / "stderr").read_text())


def test_shown_ranks_and_files_of_all(tmp_path: Path) -> None:
    options = ("--output-filename", str(tmp_path), "--output-filter", "rank1")
    done = farandole("run", "-np", "3", *options, "sh", "-c", "echo $FARANDOLE_RANK; echo err >&2")
    assert (done.returncode, done.stdout, done.stderr) == (0, "[1] 1\n", "[1] err\n")
    assert [(tmp_path / f"rank.{rank}" / "stdout").read_text() for rank in range(3)] == ["0\n", "1\n", "2\n"]


def test_as_many_ranks_as_cores_or_slots() -> None:
    done = farandole("run", "--nproc", "auto", "sh", "-c", "echo $FARANDOLE_SIZE")
    assert done.stdout.splitlines().count(f"[0] {available_cores()}") == 1
    done = farandole("run", "-np", "auto", "-H", "localhost:3", "--output-filter", "0", "sh", "-c", "echo $WORLD_SIZE")
    assert done.stdout == "[0] 3\n"


def test_restarts() -> None:
    script = "echo $FARANDOLE_RANK $TORCHELASTIC_RESTART_COUNT/$TORCHELASTIC_MAX_RESTARTS; "
    fails = script + "test $FARANDOLE_RANK = 0 || exit $((7 + TORCHELASTIC_RESTART_COUNT))"
    done = farandole("run", "-np", "2", "--max-restarts", "1", "sh", "-c", fails)
    assert done.returncode == 8
    assert sorted(done.stdout.splitlines()) == ["[0] 0 0/1", "[0] 0 1/1", "[1] 1 0/1", "[1] 1 1/1"]
    again = "farandole: rank 1 failed: exited with code 7; all ranks start again (restart 1 of 1)"
    last = ["farandole: rank 1 failed in attempt 2: exited with code 8"]
    last += ["attempt 1: rank 1 failed: exited with code 7"]
    assert done.stderr.splitlines()[:3] == [again, *last]
    passes = script + "test $TORCHELASTIC_RESTART_COUNT = 1 || exit 1"
    done = farandole("run", "-np", "2", "--max-restarts", "3", "sh", "-c", passes)
    assert (done.returncode, done.stderr.count("start again")) == (0, 1)


@pytest.mark.parametrize("variable", ["FARANDOLE_TIMELINE", "HOROVOD_TIMELINE"])
def test_each_attempt_has_a_timeline_of_its_own(variable: str, tmp_path: Path) -> None:
    fails = "echo $FARANDOLE_TIMELINE:$HOROVOD_TIMELINE; exit 1"
    words = ("run", "-np", "1", "--max-restarts", "1", "sh", "-c", fails)
    done = farandole(*words, env={variable: str(tmp_path / "t.json")})
    first, second = (line.removeprefix("[0] ") for line in done.stdout.splitlines())
    assert first.strip(":") == str(tmp_path / "t.json")
    assert second.partition(":")[0] == str(tmp_path / "t.restart1.json")  # this variable takes precedence
    assert "restart" not in farandole(*words, env={variable: "DYNAMIC"}).stdout


def test_check_and_completion_as_commands(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import horovod.torch as hvd\nhvd.init()\nimport petastorm.ngram\n")
    done = farandole("check", "train.py", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    assert "train.py:3: petastorm.ngram: no; make windows of rows" in done.stdout
    done = farandole("completion", "zsh")
    assert done.stdout.startswith("autoload -U +X bashcompinit && bashcompinit\n_farandole() {\n")


def test_long_lines_of_many_ranks_stay_whole() -> None:
    script = "import os; [print(os.environ['FARANDOLE_RANK'] * 30000) for _ in range(50)]"
    done = farandole("run", "-np", "4", sys.executable, "-c", script)
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {str(rank) * 30000}" for rank in range(4) for _ in range(50)]


def test_threads_and_settings() -> None:
    options = ("--verbose", "--fusion-threshold-mb", "64", "--no-stall-check", "--autotune-log-file", "log")
    script = "echo $OMP_NUM_THREADS $FARANDOLE_FUSION_THRESHOLD $FARANDOLE_STALL_CHECK_DISABLE $FARANDOLE_AUTOTUNE_LOG"
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        command("run", "-np", "1", *options, "sh", "-c", script), env=env, capture_output=True, text=True, timeout=120
    )
    threads = re.search(r"OMP_NUM_THREADS=(\d+) for each rank", done.stderr)
    assert threads is not None
    assert done.stdout == f"[0] {threads[1]} {64 << 20} 1 log\n"
    done = farandole("run", "-np", "1", "sh", "-c", "echo $OMP_NUM_THREADS", env={"OMP_NUM_THREADS": "7"})
    assert (done.stdout, done.stderr) == ("[0] 7\n", "")


def test_binding() -> None:
    cores = sorted(os.sched_getaffinity(0))
    done = farandole(
        "run", "-np", str(len(cores)), "--binding", "cores", "grep", "Cpus_allowed_list", "/proc/self/status"
    )
    bound = sorted(line.split() for line in done.stdout.splitlines())
    assert bound == sorted([f"[{rank}]", "Cpus_allowed_list:", str(core)] for rank, core in enumerate(cores))


@pytest.mark.parametrize(
    ("how", "code", "reason"),
    [
        ("raise KeyError('lost')", 1, "exited with code 1"),
        ("sys.exit(7)", 7, "exited with code 7"),
        ("os._exit(9)", 9, "exited with code 9"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was killed by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "was killed by SIGSEGV"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_first_failure_ends_all_and_is_reported(how: str, code: int, reason: str, size: int) -> None:
    guilty = size - 1
    script = f"import os, signal, sys, time\nif os.environ['HOROVOD_RANK'] == '{guilty}':\n {how}\ntime.sleep(1000)"
    done = farandole("run", "-np", str(size), sys.executable, "-c", script)
    assert done.returncode == code
    assert f"farandole: rank {guilty} failed: {reason}" in done.stderr
    assert ("KeyError: 'lost'" in done.stderr) == ("KeyError" in how)


def test_the_rank_that_lost_its_peer_is_not_blamed() -> None:
    # Rank 0 ends first, by a hair, because of rank 1.
    script = """
import os, time
from farandole.errors import PeerLost
if os.environ["FARANDOLE_RANK"] == "0":
    raise PeerLost("grad", 1, "was killed or crashed")
time.sleep(0.3)
raise ValueError("the cause")
"""
    done = farandole("run", "-np", "2", sys.executable, "-c", script)
    assert "farandole: rank 1 failed: exited with code 1" in done.stderr
    assert done.stderr.rstrip().endswith("ValueError: the cause")


def test_who_ends_well_before_init_keeps_nobody_waiting() -> None:
    script = "import os, farandole.numpy as hvd\nif os.environ['FARANDOLE_RANK'] == '0':\n hvd.init()"
    # Else rank 0 would wait for as long as ranks may take to start.
    done = farandole("run", "-np", "2", sys.executable, "-c", script, env={"FARANDOLE_START_TIMEOUT": "300"})
    assert done.returncode == 1
    assert "RendezvousError: rank 1 has ended and will not take part" in done.stderr


def test_ranks_may_end_at_different_times() -> None:
    done = farandole("run", "-np", "2", "sh", "-c", "sleep 1.$FARANDOLE_RANK; sleep $FARANDOLE_RANK; echo end")
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["[0] end", "[1] end"])


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (("pyhton", "train.py"), 127, "cannot run 'pyhton': it is in no directory of PATH"),
        (("./train.py",), 127, "cannot run './train.py': there is no such file"),
        ((__file__,), 126, f"the file is not executable; did you mean: python {__file__}"),
    ],
)
def test_no_such_program_is_said_once(words: tuple[str, ...], code: int, sentence: str) -> None:
    done = farandole("run", "-np", "4", *words)
    assert done.returncode == code
    assert done.stderr.count("\n") == 1 and sentence in done.stderr


def test_hosts() -> None:
    assert farandole("run", "-np", "2", "-H", "localhost:2", "true").returncode == 0
    done = farandole("run", "-np", "3", "-H", "localhost:2", "true")
    assert done.returncode == 2 and "3 ranks need 3 slots, but localhost:2 has 2" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_asked_to_end(number: signal.Signals, tmp_path: Path) -> None:
    names = [f"{kind}.{rank}" for kind in ("rank", "daemon") for rank in range(2)]
    with launched(tmp_path, names, "run", "-np", "2", sys.executable, "-c", SLEEPERS) as (process, watch):
        os.killpg(process.pid, number)  # as the terminal does
        out, err = process.communicate(timeout=PATIENCE)
        assert watch.survivors(timeout=REAPED) == []
    assert process.returncode == 128 + number
    assert out == ""
    said = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
    assert err == f"farandole: {said}; all ranks have been ended\n"


# A rank that waits until its launcher was hung up, and hangs itself up then.
HUNG_UP = """
import os, pathlib, signal, sys, time
rank = os.environ["FARANDOLE_RANK"]
pathlib.Path(f"rank.{rank}").write_text(f"{os.getpid()}\\n")
while not pathlib.Path("hung-up").exists():
    time.sleep(0.02)
os.kill(os.getpid(), signal.SIGHUP)
print("trained")
"""


def test_a_job_below_nohup_survives_the_hangup_of_its_terminal(tmp_path: Path) -> None:
    below_nohup = ["sh", "-c", "trap '' HUP; exec \"$@\"", "sh", *command()]
    words = ("run", "-np", "2", sys.executable, "-c", HUNG_UP)
    with launched(tmp_path, ["rank.0", "rank.1"], *words, program=below_nohup) as (process, watch):
        os.killpg(process.pid, signal.SIGHUP)  # as the terminal does
        (tmp_path / "hung-up").touch()
        out, err = process.communicate(timeout=PATIENCE)
        assert watch.survivors(timeout=REAPED) == []
    assert (process.returncode, err) == (0, "")
    assert sorted(out.splitlines()) == ["[0] trained", "[1] trained"]


# The command, but that ranks have longer than any test to end by themselves once they are asked to.
PATIENT = """
import sys
from datetime import timedelta
from farandole.launch import cli, job
job.Job.stop.__defaults__ = (timedelta(hours=1),)
sys.exit(cli.main())
"""


def test_a_second_interrupt_does_not_wait(tmp_path: Path) -> None:
    script = "trap 'echo asked' TERM; echo $$ > rank.0; echo ready; while :; do sleep 0.05; done"
    words = ["run", "-np", "1", "sh", "-c", script]
    with launched(tmp_path, ["rank.0"], *words, program=[sys.executable, "-c", PATIENT]) as (process, watch):
        assert process.stdout is not None
        assert process.stdout.readline() == "[0] ready\n"  # the launcher is no longer starting the rank
        os.killpg(process.pid, signal.SIGINT)
        assert process.stdout.readline() == "[0] asked\n"
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE)
        assert watch.survivors(timeout=REAPED) == []
    assert process.returncode == 130
    assert "Traceback" not in err


def test_nothing_survives_a_killed_launcher(tmp_path: Path) -> None:
    names = [f"{kind}.{rank}" for kind in ("rank", "daemon") for rank in range(3)]
    with launched(tmp_path, names, "run", "-np", "3", sys.executable, "-c", SLEEPERS) as (process, watch):
        process.kill()
        assert watch.survivors() == []


def test_nothing_survives_a_rank_that_ends_well(tmp_path: Path) -> None:
    names = [f"daemon.{rank}" for rank in range(2)]
    script = SLEEPERS.replace("time.sleep(1000)", "while not os.path.exists('go'): time.sleep(0.01)")
    with launched(tmp_path, names, "run", "-np", "2", sys.executable, "-c", script) as (process, watch):
        (tmp_path / "go").touch()
        assert process.wait(PATIENCE) == 0
        assert watch.survivors(timeout=REAPED) == []


def test_a_reader_that_has_seen_enough(tmp_path: Path) -> None:
    line = " ".join(command("run", "-np", "2", "yes"))
    done = subprocess.run(["sh", "-c", f"{line} | head -2"], capture_output=True, text=True, timeout=120)
    assert len(done.stdout.splitlines()) == 2
    assert "its output could not be written" in done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_lost_lines_of_a_rank_that_ends_well_are_a_failure() -> None:
    """Programs save their state when they are ended, and exit with code 0."""
    script = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); print(1); time.sleep(60)"
    with open("/dev/full", "w") as full:
        words = command("run", "-np", "2", sys.executable, "-c", script)
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr == (
        "farandole: no rank failed, but lines of the ranks are lost: [Errno 28] No space left on device\n"
    )


def test_a_slow_reader_of_a_pipe_that_does_not_block() -> None:
    """Parents such as servers and terminals make their descriptors non-blocking, for all who share them."""
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    with open(ours, encoding="utf-8") as reader:
        words = command("run", "-np", "2", "seq", "20000")
        with subprocess.Popen(words, stdout=theirs, stderr=subprocess.PIPE, text=True) as process:
            os.close(theirs)
            time.sleep(1.0)  # the pipe is full meanwhile
            lines = reader.read().splitlines()
            _, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (0, "")
    assert sorted(lines) == sorted(f"[{rank}] {number + 1}" for rank in range(2) for number in range(20000))


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&- <&-"])
def test_streams_that_were_closed_before_the_start(closed: str, tmp_path: Path) -> None:
    """A rank's lines are in its file; what nobody wants to see is no failure."""
    line = " ".join(command("run", "-np", "2", "--output-filename", str(tmp_path), "echo", "line"))
    done = subprocess.run(["sh", "-c", f"{line} {closed}"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [(tmp_path / f"rank.{rank}" / "stdout").read_text() for rank in range(2)] == ["line\n", "line\n"]


@pytest.mark.native
def test_a_rank_killed_from_outside_in_the_middle_of_training(tmp_path: Path) -> None:
    script = """
import os, numpy as np, farandole.numpy as hvd
hvd.init()
for step in range(10**9):
    hvd.allreduce(np.ones(4), name="grad")
    if step == 20:
        with open(f"rank.{hvd.rank()}", "w") as file:
            print(os.getpid(), file=file)
"""
    names = [f"rank.{rank}" for rank in range(3)]
    with launched(tmp_path, names, "run", "-np", "3", sys.executable, "-c", script) as (process, watch):
        os.kill(int((tmp_path / "rank.1").read_text()), signal.SIGKILL)
        _, err = process.communicate(timeout=PATIENCE)
        assert watch.survivors(timeout=REAPED) == []
    assert process.returncode == 137
    assert "farandole: rank 1 failed: was killed by SIGKILL" in err


def test_the_demo_trains_two_ranks() -> None:
    pytest.importorskip("torch")
    done = farandole("demo", "--steps", "100")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith("step 50  loss ") and "farandole run -np 2" in done.stdout
