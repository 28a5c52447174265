"""The command line: options, refusals, the environment that ranks get."""

import argparse
import logging
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name

import pytest

import farandole
from farandole.config import Config
from farandole.launch import cli
from farandole.launch.environment import with_settings
from farandole.launch.options import ALIASES, Given, add_horovod_options, add_setting_options, ranks_named
from farandole.refusals import IGNORED_OPTIONS, REFUSED_OPTIONS


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def parse(*words: str) -> Given:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_setting_options(parser)
    add_horovod_options(parser)
    return parser.parse_args(words, namespace=Given())


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (("--fusion-threshold-mb", "64"), {"fusion_threshold": 64 << 20}),
        (("--fusion-threshold", "1KiB"), {"fusion_threshold": 1024}),
        (("--cache-capacity", "0"), {"cache_capacity": 0}),
        (("--timeline-filename", "/t.json", "--timeline-mark-cycles"), {"timeline": "/t.json"}),
        (("--no-stall-check",), {"stall_check_disable": True}),
        (("--no-stall-check", "--stall-check"), {"stall_check_disable": False}),
        (("--log-level", "debug"), {"log_level": "debug"}),
        (("--network-interfaces", "lo"), {"interface": "lo"}),
        (("--network-interfaces", "eth0,ib0"), {"interface": "eth0,ib0"}),
    ],
)
def test_settings(words: tuple[str, ...], settings: dict[str, object]) -> None:
    config = Config.from_environment({}, **parse(*words).settings)
    assert {name: getattr(config, name) for name in settings} == settings


def test_horovods_seconds() -> None:
    words = ("--stall-check-warning-time-seconds", "5", "--stall-check-shutdown-time-seconds", "9", "--start-timeout")
    config = Config.from_environment({}, **parse(*words, "30").settings)
    times = (config.stall_check_time, config.stall_shutdown_time, config.start_timeout)
    assert [time.total_seconds() for time in times] == [5, 9, 30]


def test_every_setting_has_an_option() -> None:
    assert {setting.name for setting in Config.settings()} >= {alias.setting for alias in ALIASES.values()}
    chosen = {"level": "info", "fabric": "mpi", "route": "nccl"}
    for setting in Config.settings():
        words = [] if setting.kind.name == "flag" else [chosen.get(setting.kind.name, "3")]
        assert set(parse(f"--{setting.name.replace('_', '-')}", *words).settings) == {setting.name}


@pytest.mark.parametrize(("flag", "values"), [(flag, each.values) for each in IGNORED_OPTIONS for flag in each.flags])
def test_what_has_no_meaning_is_named(flag: str, values: int) -> None:
    (sentence,) = parse(flag, *["1"] * values).ignored
    assert sentence.startswith(f"{flag} has no effect: ")


@pytest.mark.parametrize(("flag", "values"), [(flag, each.values) for each in REFUSED_OPTIONS for flag in each.flags])
def test_what_cannot_be_is_refused_by_name(flag: str, values: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(flag, *["1"] * values)
    assert "is not supported: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "the following arguments are required: command"),
        (("go",), "invalid choice: 'go'"),
        (("run", "true"), "the number of ranks is missing: -np N"),
        (("run", "-np", "2"), "the program to run is missing"),
        (("run", "-np", "2", "--"), "the program to run is missing"),
        (("run", "-np", "0", "true"), "must be a whole number >= 1, got '0'"),
        (("run", "-np", "2", "--cache-capacity", "many", "true"), "--cache-capacity: 'many' is no count"),
        (("run", "-np", "2", "-H", "a:1", "--hostfile", "f", "true"), "not allowed with argument"),
        (("run", "-np", "2", "--no-such-option", "true"), "unrecognized arguments: --no-such-option\n"),
        (("run", "-np", "2", "--timelien", "t.json", "true"), "arguments: --timelien; did you mean --timeline?"),
        (("run", "--timelien=t.json", "-np", "2", "true"), "--timelien=t.json; did you mean --timeline?"),
        (("run", "-np", "some", "true"), "must be a whole number >= 1, got 'some'"),
        (("run", "-np", "2", "--max-restarts", "-1", "true"), "must be a whole number >= 0, got '-1'"),
        (("run", "-np", "2", "--output-filter", "rank3-1", "true"), "must be ranks, as in rank0 or 0,4-7"),
        (("run", "-np", "2", "--output-filter", "0-99999999999", "true"), "must be ranks, as in rank0 or 0,4-7"),
        (("run", "-np", "2", "--mpi", "--max-restarts", "1", "true"), "mpirun prints all lines and starts once"),
        (("docter",), "did you mean doctor?"),
        (("doctor", "--hots", "a,b"), "did you mean --hosts?"),
        (("timeline", "reprot", "t.json"), "did you mean report?"),
    ],
)
def test_usage(words: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(words)
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("words", [("-v",), ("--version",), ("run", "-v")])
def test_version(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(words)
    assert capsys.readouterr().out == f"farandole {farandole.__version__}\n"


def test_names_of_ranks() -> None:
    assert list(ranks_named("rank0")) == [0]
    assert list(ranks_named("0, 4-6,rank9")) == [0, 4, 5, 6, 9]


def test_a_filter_of_ranks_that_there_are_not(caplog: pytest.LogCaptureFixture) -> None:
    assert cli.main(("run", "-np", "2", "--output-filter", "2", "true")) == 2
    assert "output_filter: names rank 2 of 2, counted from 0" in caplog.text


def test_check_build(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(("run", "--check-build")) == 0
    assert "[X] this machine" in capsys.readouterr().out


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(("run", "--help"))
    out = capsys.readouterr().out
    assert all(f"--{setting.name.replace('_', '-')}" in out for setting in Config.settings())
    assert "--jsrun" not in out  # horovodrun's, which is refused
    titles = {setting.topic for setting in Config.settings()} | {"ranks", "mpirun", "output", "information", "examples"}
    assert titles <= {line.removesuffix(":") for line in out.splitlines()}


def test_help_shows_commands_examples_and_where_to_read_on(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(("--help",))
    out = capsys.readouterr().out
    commands = out.partition("commands:\n")[2].partition("\n\n")[0]
    assert {line.split()[0] for line in commands.splitlines()} == set(cli.COMMANDS)
    examples = [line.split() for line in out.partition("examples:\n")[2].partition("\n\n")[0].splitlines()]
    for program, *words in examples:
        assert program == "farandole"
        resolve_name(cli.COMMANDS[words[0]].parser)().parse_args(words[1:], namespace=Given())
    modules = re.findall(r"python -m pydoc (\S+)", out.partition("read on")[2])
    assert len(modules) >= 3
    assert all(find_spec(module) for module in modules)


@pytest.mark.parametrize(
    "words", [(), ("run",), ("doctor",), ("timeline", "merge"), ("demo",), ("check",), ("as-horovod",), ("completion",)]
)
def test_help_fits_a_terminal(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        cli.main((*words, "--help"))
    assert [line for line in capsys.readouterr().out.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_each_command_and_shown_option(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(("completion", shell)) == 0
    out = capsys.readouterr().out
    options = [f"--{setting.name.replace('_', '-')}" for setting in Config.settings()]
    prefix = "-l " if shell == "fish" else "--"
    assert [each for each in options if f"{prefix}{each[2:]}" not in out] == []
    assert all(name in out for name in cli.COMMANDS)
    assert "jsrun" not in out  # horovodrun's, which is refused


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (("ch",), ["check"]),
        (("run", "--bind"), ["--binding", "--binding-args"]),
        (("run", "--binding", ""), ["none", "cores"]),
        (("timeline", "re"), ["report"]),
        (("run", "-np", "2", "tr"), []),  # names of files, by bash itself
    ],
)
def test_bash_completes(words: tuple[str, ...], completed: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(("completion", "bash")) == 0
    typed = " ".join(f"'{word}'" for word in ("farandole", *words))
    script = (
        f'{capsys.readouterr().out}COMP_WORDS=({typed}); COMP_CWORD={len(words)}; _farandole; echo "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.stdout.split(), done.stderr) == (completed, "")


def test_settings_replace_what_the_environment_says() -> None:
    env = {"HOROVOD_TIMELINE": "old", "FARANDOLE_CACHE_CAPACITY": "1", "HOROVOD_CACHE_CAPACITY": "2", "OTHER": "x"}
    config = Config(cache_capacity=16384)
    assert with_settings(env, config, ["cache_capacity"]) == {
        "HOROVOD_TIMELINE": "old",
        "FARANDOLE_CACHE_CAPACITY": "16384",
        "OTHER": "x",
    }
    assert Config.from_environment(with_settings(env, config)) == config


def test_one_route_on_gpus_leaves_the_variable_of_the_others() -> None:
    env = {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_GPU_ALLREDUCE": "NCCL"}
    config = Config.from_environment(env, gpu_allreduce="host")
    of_ranks = Config.from_environment(with_settings(env, config, ["gpu_allreduce"]))
    assert (of_ranks.gpu_allreduce, of_ranks.gpu_allgather, of_ranks.gpu_broadcast) == ("host", "nccl", "nccl")
    assert of_ranks == config


def test_settings_that_a_config_leaves_free_stay_free_on_the_ranks() -> None:
    config = Config(autotune=True, cache_capacity=7)
    changed = with_settings({"HOROVOD_FUSION_THRESHOLD": "1"}, config)
    of_ranks = Config.from_environment(changed)
    assert of_ranks == config
    assert of_ranks.given == {"autotune", "cache_capacity"}
    assert of_ranks.leaves_free("fusion_threshold") and of_ranks.leaves_free("slot_bytes")


@pytest.mark.parametrize(
    ("words", "level", "shown"),
    [((), "info", True), ((), "", False), (("--log-level", "error"), "info", False), (("--verbose",), "", True)],
)
def test_the_variable_sets_the_launchers_level_too(words: tuple[str, ...], level: str, shown: bool) -> None:
    env = {**os.environ, "HOROVOD_LOG_LEVEL": level}
    command = [sys.executable, "-m", "farandole.launch.cli", "run", "-np", "1", *words, "true"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert ("rendezvous at" in done.stderr) == shown, done.stderr


def test_the_launcher_starts_light() -> None:
    heavy = "{'numpy', 'torch', 'cloudpickle', 'farandole._native', 'rich', 'asyncio'}"
    program = f"import sys, farandole.launch.cli; print(sorted({heavy} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("[]\n", "")


# A command that gets Ctrl-C when it begins to import its launcher.
INTERRUPTED_IMPORT = """
import os, signal, sys
class Interrupt:
    def find_spec(self, name, path, target=None):
        if name == "farandole.launch.options":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
import importlib
module, _, function = sys.argv.pop(1).partition(":")
sys.exit(getattr(importlib.import_module(module), function)())
"""


@pytest.mark.parametrize("name", ["farandole", "horovodrun"])
def test_an_interrupt_of_the_imports_ends_a_command_quietly(name: str) -> None:
    scripts = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]["scripts"]
    words = [sys.executable, "-c", INTERRUPTED_IMPORT, scripts[name], "run", "-np", "1", "true"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
