"""`farandole.run`: run a Python function as N ranks."""

import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, SupportsIndex, TypeVar, Unpack

from farandole.config import Config
from farandole.errors import ConfigError
from farandole.launch.backend import Backend, Binding, Call, OnLine
from farandole.launch.backends import choose_backend, variables_of_ranks
from farandole.launch.backends.ssh import Ssh
from farandole.launch.elastic.job import ElasticJob
from farandole.launch.elastic.options import Elastic, ElasticArguments
from farandole.launch.environment import checked_variables, refuse_mpi, with_settings
from farandole.launch.job import Job, open_job
from farandole.launch.output import Output
from farandole.launch.pickling import dump_call, load_value

T = TypeVar("T")


def run(
    func: Callable[..., T],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    num_proc: int = 1,
    *,
    hosts: str | None = None,
    hostfile: str | os.PathLike[str] | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | os.PathLike[str] | None = None,
    start_timeout: float | timedelta | None = None,
    output_filename: str | os.PathLike[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    network_interface: str | None = None,
    executable: str | None = None,
    env: Mapping[str, str] | None = None,
    config: Config | None = None,
    binding: Binding = "none",
    on_line: OnLine | None = None,
    **elastic: Unpack[ElasticArguments],
) -> list[T]:
    """Call `func(*args, **kwargs)` on `num_proc` ranks, each a new process; return the results by rank.

    Ranks fill the slots of `hosts` ("host1:2,host2:2") or of the file `hostfile`, which ssh reaches; default: this
    machine. Blocks until every rank has returned. Ranks get this process's environment, changed by `env` and `config`,
    and no input. Their output is printed here line by line after "[rank]", or passed to `on_line(rank, stream, line)`.
    `sys.exit(0)` on a rank counts as returning None. When a rank fails, all others are ended, and its `RankFailed` is
    raised with its own exception as the cause; Ctrl-C ends them, too. No process that a rank has started is left
    afterwards.

    With one of the arguments `min_num_proc`, `max_num_proc`, `host_discovery_script` (with `slots` for hosts without a
    number), `reset_limit` and `cooldown_range` (seconds) the job is elastic, see `farandole.elastic`; they mean what
    the options of `farandole run` do. Then the results are those of the last ranks.

    Raises `PicklingError` naming the part of the call that cannot be pickled, and `ConfigError`,
    `SlotsError` or `HostsError` if ranks cannot be started."""
    if on_line is not None and output_filename is not None:
        raise ConfigError("output_filename", "give output_filename or on_line, not both")
    if not isinstance(num_proc, SupportsIndex):
        raise ConfigError("num_proc", f"must be an integer, got {num_proc!r}")
    payload = dump_call(func, args, kwargs or {})
    environment = {**os.environ, **checked_variables(env)}
    environment = environment if config is None else with_settings(environment, config)
    asked = {"start_timeout": start_timeout, "interface": network_interface}
    given = {name: value for name, value in asked.items() if value is not None}
    settings = Config.from_environment(environment, **given)
    refuse_mpi(settings, num_proc)
    ssh = Ssh(port=ssh_port, identity_file=None if ssh_identity_file is None else os.fspath(ssh_identity_file))
    sizes = _elastic(elastic)
    task = Call(payload, executable or sys.executable, settings.start_timeout)
    directory = None if output_filename is None else Path(output_filename)
    with contextlib.ExitStack() as stack:
        if on_line is None:
            on_line = stack.enter_context(Output(num_proc, timestamp=prefix_output_with_timestamp, directory=directory))
        environment = with_settings(variables_of_ranks(environment), settings, given)
        if sizes.asked:
            job = sizes.open_job(num_proc, environment, settings, hosts=hosts, hostfile=hostfile, shell=ssh)
            return _results(stack.enter_context(job), task, on_line)
        backend = choose_backend(hosts, hostfile, num_proc, ssh, settings.interface, settings.start_timeout)
        return run_call(task, num_proc, environment, on_line, backend=backend, binding=binding)


def _elastic(given: ElasticArguments) -> Elastic:
    if unknown := given.keys() - ElasticArguments.__annotations__:
        hint = "; the number of ranks is num_proc" if "np" in unknown else ""
        raise TypeError(f"run() got an unexpected keyword argument {min(unknown)!r}{hint}")
    return Elastic(**given)


def run_call(
    task: Call,
    num_proc: int,
    environment: Mapping[str, str],
    on_line: OnLine,
    *,
    backend: Backend | None = None,
    binding: Binding = "none",
) -> list[Any]:
    """Make a pickled call on `num_proc` ranks with `environment`, as `run` does; return the results by rank."""
    with open_job(num_proc, environment, backend=backend, binding=binding) as job:
        return _results(job, task, on_line)


def _results(job: Job | ElasticJob, task: Call, on_line: OnLine) -> list[Any]:
    failure = job.run(task, on_line)
    if failure is not None:
        raise failure.error() from failure.cause
    return [load_value(rank, value) for rank, value in enumerate(job.values())]
