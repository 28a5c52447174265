"""The function `horovod.run`, with Horovod's arguments."""

import logging
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar, cast

from farandole.compat.output import HorovodOutput
from farandole.errors import ConfigError
from farandole.launch.backends.ssh import Ssh
from farandole.launch.elastic.options import ElasticArguments
from farandole.launch.environment import without_torch
from farandole.launch.mpi_call import MpirunOutput, asked_of_mpirun, call_by_mpirun
from farandole.launch.run import run as run_ranks
from farandole.refusals import IGNORED_ARGUMENTS

log = logging.getLogger(__name__)

T = TypeVar("T")

_OLD_NAMES = {
    "np": "num_proc",
    "min_np": "min_num_proc",
    "max_np": "max_num_proc",
    "network_interface": "network_interfaces",
}


def run(
    func: Callable[..., T],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | os.PathLike[str] | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | os.PathLike[str] | None = None,
    verbose: int | bool | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: Iterable[str] | str | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[T]:
    """Call `func(*args, **kwargs)` on `num_proc` ranks and return the results by rank.

    See `farandole.run`; lines of the ranks' output begin with "[0]<stdout>:". With `use_mpi`, or with `mpi_args` and
    without `use_gloo`, the mpirun on PATH starts the ranks (see `horovodrun --mpi`), and lines and files have its
    format. A warning names the ignored arguments. Raises `ConfigError`, which is a `ValueError`, for arguments that
    exclude one another, and the `RankFailed` of the rank that failed first."""
    given = _checked(locals())
    num_proc = num_proc if np is None else np
    interface = network_interface or _listed(network_interfaces)
    if use_mpi or (mpi_args is not None and not use_gloo):
        ssh = Ssh(port=ssh_port, identity_file=ssh_identity_file)
        asked = asked_of_mpirun(num_proc, hosts, hostfile, mpi_args, interface, ssh, output_filename)
        with MpirunOutput(num_proc) as lines:
            return call_by_mpirun(func, args, kwargs or {}, asked, start_timeout, executable=executable, on_line=lines)
    with HorovodOutput(num_proc, directory=None if output_filename is None else Path(output_filename)) as output:
        return run_ranks(
            func,
            args,
            kwargs,
            num_proc,
            hosts=hosts,
            hostfile=hostfile,
            ssh_port=ssh_port,
            ssh_identity_file=ssh_identity_file,
            start_timeout=start_timeout,
            network_interface=interface,
            executable=executable,
            env=without_torch({}),
            on_line=output,
            **_sizes(given),
        )


def _sizes(given: Mapping[str, object]) -> ElasticArguments:
    return cast(ElasticArguments, {name: given[name] for name in ElasticArguments.__annotations__ if name in given})


def _checked(arguments: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments that were given, those with old names under the new ones; refuse some of them together."""
    given = {name: value for name, value in arguments.items() if value is not None and value is not False}
    if "use_mpi" in given and "use_gloo" in given:
        raise ConfigError("use_mpi", "give use_gloo or use_mpi, not both")
    if "hosts" in given and "hostfile" in given:
        raise ConfigError("hosts", "give hosts or a hostfile, not both")
    for old, new in _OLD_NAMES.items():
        if old in given:
            given[new] = given[old]
            warnings.warn(f"{old}= is deprecated; use {new}=", DeprecationWarning, stacklevel=3)
    ignored = [f"{name} ({why})" for name, why in IGNORED_ARGUMENTS.items() if name in given]
    if ignored:
        log.warning("these arguments of horovod.run have no effect: %s", "; ".join(ignored))
    return given


def _listed(names: Iterable[str] | str | None) -> str | None:
    return names if names is None or isinstance(names, str) else ",".join(names)
