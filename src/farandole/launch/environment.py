"""Environment of ranks: the launcher's own, with settings written into it."""

import importlib.util
import logging
import os
from collections.abc import Collection, Mapping
from pathlib import Path

from farandole.config import Config
from farandole.errors import ConfigError
from farandole.other_launchers import find_other_launch

log = logging.getLogger(__name__)

_TORCH = next(setting for setting in Config.settings() if setting.name == "torch_env")


def checked_variables(env: Mapping[str, str] | None) -> dict[str, str]:
    """Return a user's variables; raises `ConfigError` for one that no process can have, for which no rank can start."""
    given = dict(env or {})
    for name, value in given.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise ConfigError("env", f"variables are texts, got {name}={value!r}")
        if not name or "=" in name or "\0" in name + value:
            raise ConfigError("env", f"no process can have the variable {name!r} with the value {value!r}")
    return given


def refuse_mpi(config: Config, ranks: int) -> None:
    """Raise `ConfigError` if the fabric of several `ranks` is MPI: only MPI's own launchers connect its processes."""
    if config.fabric == "mpi" and ranks != 1:
        raise ConfigError(
            "fabric",
            f"is mpi, but these ranks start without MPI. Let mpirun start them: farandole run --mpi -np {ranks} python "
            "train.py, or mpirun itself, with FARANDOLE_FABRIC=mpi in the environment of all ranks",
        )


def warn_of_copies(environment: Mapping[str, str]) -> None:
    """Warn if another launcher has started several copies of this one. A rank may start a job without a warning."""
    found = None if {"FARANDOLE_RANK", "FARANDOLE_MEMBER"} & environment.keys() else find_other_launch(environment)
    if found is not None:
        log.warning("%s; each of them starts a job of its own, unconnected to the others", found)


def wants_torch(environment: Mapping[str, str]) -> bool:
    """Return whether ranks with `environment` get torchrun's variables."""
    value = _TORCH.read(environment)
    return bool(_TORCH.default if value is None else value)


def without_torch(variables: Mapping[str, str]) -> dict[str, str]:
    """Return `variables` for ranks of Horovod's launchers, which by default have no variables of torchrun.

    FARANDOLE_TORCH_ENV, in `variables` or in this process's environment, takes precedence."""
    name = _TORCH.variables[0]
    return {name: os.environ.get(name) or "no", **variables}


def with_settings(
    environment: Mapping[str, str], config: Config, names: Collection[str] | None = None
) -> dict[str, str]:
    """Return a copy of `environment` with the settings `names` (None: all) of `config` in place of its own.

    Of all settings, those that `config` leaves free get no variable, so that autotune may change them on the ranks.
    With `as_gloo` add the variables by which JAX uses farandole, unless they name another library of MPI."""
    chosen = [setting for setting in Config.settings() if names is None or setting.name in names]
    others = [setting for setting in Config.settings() if names is not None and setting.name not in names]
    # Several settings read HOROVOD_GPU_OPERATIONS, so a change of one must leave it for the others.
    kept = {variable for setting in others for variable in setting.variables}
    replaced = {variable for setting in chosen for variable in setting.variables} - kept
    changed = {name: value for name, value in environment.items() if name not in replaced}
    for setting in chosen:
        value = getattr(config, setting.name)
        if value is not None and (names is not None or not config.leaves_free(setting.name)):
            changed[setting.variables[0]] = setting.spell(value)
    return {**changed, **_for_jax()} if config.as_gloo and "MPITRAMPOLINE_LIB" not in changed else changed


def _for_jax() -> dict[str, str]:
    # jaxlib reads the second one when it is imported, so no code of a rank could set it.
    core = importlib.util.find_spec("farandole._native")
    assert core is not None and core.origin is not None
    library = Path(core.origin).with_name("_mpi.so")
    return {"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "mpi", "MPITRAMPOLINE_LIB": str(library)} if library.exists() else {}
