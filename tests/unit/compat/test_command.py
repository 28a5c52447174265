"""`horovodrun`, its file of options, `python -m farandole.compat`, and the arguments of `horovod.run`."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.compat.answers import IMPORTABLE, VERSION
from farandole.compat.children import env, environment_of_ranks, pass_on, with_answers
from farandole.compat.horovodrun import run_commandline
from farandole.compat.interface import COMMAND, INTERFACE, option_of, read_interface
from farandole.compat.launching import run
from farandole.compat.options_file import SECTIONS, parse_options
from farandole.errors import ConfigError
from farandole.refusals import IGNORED_ARGUMENTS

# Each flag of each option of horovodrun, with as many values as it takes.
OPTIONS = [
    (flag, len(values))
    for entry in read_interface(INTERFACE.read_text(encoding="utf-8"))
    if entry.module == COMMAND
    for flags, values in [option_of(entry)]
    for flag in flags
]


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


@pytest.mark.parametrize(("flag", "count"), OPTIONS)
def test_every_option_of_horovodrun_is_known(flag: str, count: int, capsys: pytest.CaptureFixture[str]) -> None:
    values = ["info" if flag == "--log-level" else "5"] * count
    # It ends before anything is started: by the option itself, or because there is no program.
    with pytest.raises(SystemExit) if flag not in ("-cb", "--check-build") else pytest.MonkeyPatch.context():
        run_commandline(["-np", "1", flag, *values])
    seen = capsys.readouterr()
    assert "unrecognized" not in seen.err
    known = ("the program to run is missing", "is not supported", "cannot read 5", VERSION, "[X] this machine")
    assert any(word in seen.err + seen.out for word in known)


def test_the_command_line_wins_over_a_file_named_before_or_after_it(tmp_path: Path) -> None:
    file = tmp_path / "horovod.yaml"
    file.write_text(
        "controller: gloo\nparams:\n  fusion_threshold_mb: 32\n  cache_capacity: 7\nstall_check:\n  enabled: off\n",
        encoding="utf-8-sig",  # with a mark at its beginning, as some editors write it
    )
    words = ["-np", "1", "--cache-capacity", "9", "--config-file", str(file), "--fusion-threshold-mb", "1"]
    script = "echo $FARANDOLE_CACHE_CAPACITY $FARANDOLE_FUSION_THRESHOLD $FARANDOLE_STALL_CHECK_DISABLE $PYTHONPATH"
    command = [sys.executable, "-m", "farandole.compat.horovodrun", *words, "sh", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={"PATH": os.environ["PATH"]})
    assert (done.returncode, done.stdout) == (0, f"[0]<stdout>:9 1048576 1 {IMPORTABLE}\n")
    assert done.stderr == ""


def test_all_keys_of_the_file() -> None:
    text = "".join(
        f"{section}:\n"
        + "".join(f"    {key}: {'3' if isinstance(option, str) else 'True'}\n" for key, option in keys.items())
        for section, keys in SECTIONS.items()
    )
    words = parse_options(text, "f")
    options = [option for keys in SECTIONS.values() for option in keys.values()]
    assert words == [f"{each}=3" if isinstance(each, str) else each[0] for each in options]
    assert {word.partition("=")[0] for word in words} <= {flag for flag, _ in OPTIONS}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", []),
        ("---\n# nothing\n\n", []),
        ("params:\n  cycle_time_ms: 3.5 # ms\n", ["--cycle-time-ms=3.5"]),
        ("params:\n  hierarchical_allreduce: no\n", ["--no-hierarchical-allreduce"]),
        ("params:\n  fusion_threshold_mb: null\n  cycle_time_ms:\n", []),
        ("params:\n  fusion_threshold_mb: -1\n", ["--fusion-threshold-mb=-1"]),
        ("timeline:\n  filename: 'a # b'\n", ["--timeline-filename=a # b"]),
        ('timeline:\n  filename: "null"\n', ["--timeline-filename=null"]),
        ("controller: mpi\n", ["--mpi"]),
        ("autotune:\nstall_check:\n  enabled: off\n", ["--no-stall-check"]),
    ],
)
def test_what_the_file_says(text: str, words: list[str]) -> None:
    assert parse_options(text, "f") == words


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("param:\n  x: 1\n", "f, line 1: 'param' is no section; there are controller, params,"),
        ("params: 3\n", "f, line 1: 'params' is no section"),
        ("params:\n  fusion: 1\n", "f, line 2: there is no 'fusion'; there are fusion_threshold_mb,"),
        (
            "params:\n  fusion_threshold_mb: 1\n    cycle_time_ms: 1\n",
            "f, line 3: 'cycle_time_ms' belongs to no section",
        ),
        ("  fusion_threshold_mb: 1\n", "f, line 1: 'fusion_threshold_mb' belongs to no section"),
        ("params:\n\tfusion_threshold_mb: 1\n", "f, line 2: 'fusion_threshold_mb: 1' cannot be read"),
        ("params: {cycle_time_ms: 1}\n", "f, line 1: 'params' is no section"),
        ("params:\n  cycle_time_ms: [1]\n", "f, line 2: params.cycle_time_ms: '[1]' cannot be read"),
        ("params:\n  torus_allreduce: 2\n", "f, line 2: params.torus_allreduce is '2'; write true or false"),
        ("controller: spark\n", "f, line 1: there is no 'spark'; there are gloo, mpi, jsrun"),
        ("- a\n", "f, line 1: '- a' cannot be read"),
    ],
)
def test_what_the_file_cannot_say(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_options(text, "f")
    assert sentence in str(raised.value)


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        words = parse_options(text, "f")
    except ConfigError as error:
        assert str(error).startswith("config_file: f, line ")
    else:
        assert all(word.startswith("--") for word in words)


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run_commandline(["-np", "1", "--config-file", "/no/such/file", "true"])
    assert "--config-file: config_file: cannot read /no/such/file: No such file" in capsys.readouterr().err


def test_an_interface_that_this_machine_lacks_is_refused_before_ranks_start(caplog: pytest.LogCaptureFixture) -> None:
    assert run_commandline(["-np", "1", "--network-interface", "ib7", "false"]) == 2
    assert caplog.text.count("interface: 'ib7' is neither an address nor one of") == 1


def test_run_refuses_sizes_out_of_order() -> None:
    with pytest.raises(ValueError, match="num_proc: is 2, and must lie between min_np 3"):
        run(print, num_proc=2, min_num_proc=3)


def test_run_refuses_what_contradicts_itself() -> None:
    with pytest.raises(ValueError, match="use_gloo or use_mpi, not both"):
        run(print, use_gloo=True, use_mpi=True)
    with pytest.raises(ValueError, match="hosts or a hostfile, not both"):
        run(print, hosts="localhost", hostfile="f")


@pytest.mark.parametrize("names", ["ib7,ib8", ["ib7", "ib8"]])
def test_run_passes_on_several_interfaces(names: str | list[str]) -> None:
    hosts = "192.0.2.1:1"  # another machine
    with pytest.raises(ConfigError, match=r"'ib7' is neither an address nor one of .*; 'ib8' is neither"):
        run(print, network_interfaces=names, hosts=hosts)


def test_run_names_what_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="5 ranks need 5 slots"), pytest.deprecated_call(match="np= is deprecated"):
        run(print, np=5, hosts="localhost:1", **dict.fromkeys(IGNORED_ARGUMENTS, True))
    (record,) = caplog.records
    assert all(f"{name} (" in record.getMessage() for name in IGNORED_ARGUMENTS)


def test_the_environment_of_children() -> None:
    folder = str(IMPORTABLE)
    assert with_answers({})["PYTHONPATH"] == folder
    given = {"PYTHONPATH": f"/a::{folder}:/b", "X": "1"}
    assert with_answers(given) == {"PYTHONPATH": f"{folder}:/a:/b", "X": "1", "FARANDOLE_TORCH_ENV": "no"}
    assert with_answers({"FARANDOLE_TORCH_ENV": "yes"})["FARANDOLE_TORCH_ENV"] == "yes"
    os.environ["COMPAT_OLD"] = "old"
    with env(COMPAT_OLD=None, COMPAT_NEW="new"):
        assert "COMPAT_OLD" not in os.environ and os.environ["COMPAT_NEW"] == "new"
    assert os.environ.pop("COMPAT_OLD") == "old" and "COMPAT_NEW" not in os.environ


@pytest.mark.parametrize("asked", ["", "yes"])
def test_torchruns_variables_below_farandole_run(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    for name, value in {"FARANDOLE_TORCH_STORE": "h:1", "RANK": "0", "MASTER_ADDR": "h", "PYTHONPATH": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("FARANDOLE_TORCH_ENV", asked)
    pass_on()
    assert ("RANK" in os.environ, "MASTER_ADDR" in os.environ) == (bool(asked), bool(asked))


OPTIONAL = """
try:
    import {0}
except ImportError as error:
    print("serial:", error)
"""


@pytest.mark.parametrize("package", ["horovod", "petastorm", "sparkdl"])
def test_a_rank_whose_python_lacks_farandole_does_not_train_alone(package: str) -> None:
    def start(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-S", "-c", OPTIONAL.format(package)]  # -S: without the folder of packages
        env = environment | {"PYTHONPATH": str(IMPORTABLE)}
        return subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)

    done = start(environment_of_ranks())
    assert (done.returncode, done.stdout) == (1, "")
    assert f"RuntimeError: import {package}: {sys.executable} cannot import farandole (No module named" in done.stderr
    assert f"the launcher, {sys.executable}," in done.stderr and "-m pip install farandole" in done.stderr
    # A process that no launcher has started may do without.
    assert start({}).stdout == "serial: No module named 'farandole'\n"


def compat(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "farandole.compat", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=cwd)


def test_a_program_runs_as_python_runs_it(tmp_path: Path) -> None:
    folder = tmp_path / "sub"
    folder.mkdir()
    (folder / "beside.py").write_text("import horovod; value = horovod.__version__")
    (folder / "program.py").write_text(
        "import sys, beside\nprint(__name__, __file__, sys.argv, sys.path[0], beside.value)\nsys.exit(7)"
    )
    done = compat("sub/program.py", "-m", "--x", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout == f"__main__ {folder}/program.py ['sub/program.py', '-m', '--x'] {folder} {VERSION}\n"


def test_the_main_module_stays_until_the_end(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import atexit, sys\nvalue = 7\natexit.register(lambda: print(sys.modules['__main__'].value))"
    )
    assert compat("program.py", cwd=tmp_path).stdout == "7\n"


@pytest.mark.parametrize("how", [("program.py",), ("-m", "program")])
def test_a_traceback_begins_with_the_program(how: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("def fail():\n    raise ValueError('bad luck')\nfail()")
    done = compat(*how, cwd=tmp_path)
    assert done.returncode == 1
    first, second, *_, last = done.stderr.splitlines()
    assert first == "Traceback (most recent call last):"
    assert second == f'  File "{tmp_path}/program.py", line 3, in <module>'
    assert last == "ValueError: bad luck"


def test_a_module_and_a_line_of_code(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys, horovod\nprint(__name__, sys.argv[1:])")
    assert compat("-m", "train", "-c", cwd=tmp_path).stdout == "__main__ ['-c']\n"
    (tmp_path / "test_it.py").write_text("def test_it():\n    import horovod.version")
    done = compat("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=tmp_path)
    assert done.returncode == 0 and "1 passed" in done.stdout
    assert compat("-c", "import sys, horovod; print(sys.argv)", "x", cwd=tmp_path).stdout == "['-c', 'x']\n"
    (tmp_path / "__main__.py").write_text("import horovod\nprint(__name__)")
    assert compat(".", cwd=tmp_path).stdout == "__main__\n"


def test_a_childs_python_finds_the_answers(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import horovod; print(horovod.__version__)'])"
    )
    assert compat("-c", code, cwd=tmp_path).stdout == f"{VERSION}\n"


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        ((), 2, "usage: python -m farandole.compat program.py"),
        (("-x",), 2, "usage: "),
        (("--help",), 0, "usage: "),
        (("no_such.py",), 2, "cannot open 'no_such.py': there is no such file"),
        (("-m", "no_such_module"), 1, "ImportError: No module named no_such_module"),
    ],
)
def test_usage(words: tuple[str, ...], code: int, text: str, tmp_path: Path) -> None:
    done = compat(*words, cwd=tmp_path)
    assert done.returncode == code
    assert text in done.stdout + done.stderr
