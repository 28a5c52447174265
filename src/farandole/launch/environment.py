"""Environment of ranks: the launcher's own, with settings written into it."""

from collections.abc import Collection, Mapping

from farandole.config import Config
from farandole.errors import ConfigError

__all__ = ["refuse_mpi", "with_settings"]


def refuse_mpi(config: Config, ranks: int) -> None:
    """Raise `ConfigError` if the fabric of several `ranks` is MPI: only MPI's own launchers connect its processes."""
    if config.fabric == "mpi" and ranks != 1:
        raise ConfigError(
            "fabric",
            f"is mpi, but these ranks start without MPI. Let mpirun start them: farandole run --mpi -np {ranks} python "
            "train.py, or mpirun itself, with FARANDOLE_FABRIC=mpi in the environment of all ranks",
        )


def with_settings(
    environment: Mapping[str, str], config: Config, names: Collection[str] | None = None
) -> dict[str, str]:
    """Return a copy of `environment` with the settings `names` (None: all) of `config` in place of its own."""
    changed = dict(environment)
    for setting in Config.settings():
        if names is not None and setting.name not in names:
            continue
        for variable in setting.variables:
            changed.pop(variable, None)
        value = getattr(config, setting.name)
        if value is not None:
            changed[setting.variables[0]] = setting.spell(value)
    return changed
