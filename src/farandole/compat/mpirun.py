"""Stand-in for Open MPI's `mpirun`: `python -m farandole.compat.mpirun -np 4 python train.py`.

It takes the options that Flyte's MPI plug-in and Horovod's documents use, and starts ranks like `farandole run`,
without MPI. It can be installed as `mpirun` in an image without Open MPI."""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import farandole
from farandole.compat.answers import VERSION
from farandole.compat.children import environment_of_ranks
from farandole.launch.cli import launch, run_parser

# Options of mpirun. Each one takes one value, except the ignored ones and parameters.
_NUMBER = ("-np", "-n", "--np", "-c", "--n")
_HOSTS = ("-H", "-host", "--host")
_HOSTFILE = ("-hostfile", "--hostfile", "-machinefile", "--machinefile", "--default-hostfile")
_IGNORED = {  # with the number of their values
    "--allow-run-as-root": 0,
    "-allow-run-as-root": 0,
    "--tag-output": 0,
    "-tag-output": 0,
    "--oversubscribe": 0,
}
_MCA = ("-mca", "--mca", "-gmca", "--gmca")  # a parameter of Open MPI, and its value
_BIND = ("-bind-to", "--bind-to")
_MAP = ("-map-by", "--map-by", "-rank-by", "--rank-by")
_PER_HOST = ("-ppn", "--ppn", "-perhost", "-npernode", "--npernode", "-N")
_EXPORT = ("-x", "--x")
_BINDINGS = {"none": "none", "core": "cores"}


def main(words: Sequence[str] | None = None) -> int:
    """Run a program as ranks; returns the exit code of `farandole run`."""
    words = sys.argv[1:] if words is None else list(words)
    parser = argparse.ArgumentParser(prog="mpirun", add_help=False)
    if words[:1] in (["--version"], ["-V"]):
        sys.stdout.write(f"mpirun (farandole) {farandole.__version__}, which needs no MPI\n")
        return 0
    try:
        options, variables, command = read_options(words)
    except ValueError as error:
        parser.error(str(error))
    environment = environment_of_ranks() | variables
    return launch(run_parser("mpirun", VERSION), [*options, *command], environment)


def read_options(words: Sequence[str]) -> tuple[list[str], dict[str, str], list[str]]:
    """Return the options of `farandole run`, the variables that are set for ranks, and the program's command.

    Ranks have the launcher's whole environment, so exporting a variable by its name alone has no effect. Raises
    `ValueError` for an option that is not supported."""
    options: list[str] = []
    variables: dict[str, str] = {}
    parameters: dict[str, str] = {}
    place = 0
    while place < len(words) and words[place].startswith("-"):
        word, place = words[place], place + 1
        count = 2 if word in _MCA else _IGNORED.get(word, 1)
        values = words[place : place + count]
        if len(values) < count:
            raise ValueError(f"{word} needs {count} values")
        place += count
        if word in _IGNORED:
            continue
        if word in _MCA:
            parameters[values[0]] = values[1]
        elif word in _EXPORT:
            name, is_set, value = values[0].partition("=")
            variables |= {name: value} if is_set else {}
        else:
            options += _translated(word, values[0])
    return [*options, *_of_parameters(parameters)], variables, list(words[place:])


def _of_parameters(parameters: Mapping[str, str]) -> Iterator[str]:
    """Yield the options for the parameters of Open MPI about reaching hosts. All others only tune Open MPI."""
    agent = parameters.get("plm_rsh_agent", "ssh").partition(":")[0].split()  # "ssh : rsh": a list of agents
    if agent[:1] and Path(agent[0]).name == "ssh" and parameters.keys() & {"plm_rsh_agent", "plm_rsh_args"}:
        yield from ("--ssh-command", " ".join([*agent, parameters.get("plm_rsh_args", "")]).rstrip())
    network = parameters.get("btl_tcp_if_include", parameters.get("oob_tcp_if_include", ""))
    if network and "/" not in network:  # a subnet such as 10.0.0.0/8 is not an interface
        yield from ("--network-interface", network)


def _translated(word: str, value: str) -> list[str]:
    if word in _NUMBER:
        return ["-np", value]
    if word in _HOSTS:
        return ["-H", value]
    if word in _HOSTFILE:
        return ["--hostfile", value]
    if word in _BIND and value in _BINDINGS:
        return ["--binding", _BINDINGS[value]]
    if word in _MAP and value == "slot":
        return []
    if word in _PER_HOST:
        raise ValueError(
            f"{word} is not known here; write the ranks of each host behind its name: -H host:{value}, or "
            f"'host slots={value}' in the file of hosts"
        )
    given = f"{word} {value}" if word in _BIND + _MAP else word
    raise ValueError(f"{given} is not known here; farandole's mpirun fills slot after slot: see farandole run --help")


if __name__ == "__main__":
    sys.exit(main())
