"""Flyte's `HorovodJob` with a least and a most number of workers."""

from dataclasses import dataclass, field, replace
from typing import Any

from flytekit.configuration import SerializationSettings
from flytekit.extend import TaskPlugins
from flytekitplugins.kfmpi import HorovodJob, Launcher
from flytekitplugins.kfmpi.task import HorovodFunctionTask

from farandole.errors import ConfigError
from farandole.integrations.flyte.worker_resources import following_task

__all__ = ["ElasticHorovodJob"]


@dataclass(kw_only=True)
class ElasticHorovodJob(HorovodJob):  # type: ignore[misc]  # flytekit has no types
    """`HorovodJob` whose training goes on when pods of workers are lost, and grows when new ones come.

    It begins with the `replicas` of `worker`, or fewer after the start timeout, needs `min_workers`, and takes in up to
    `max_workers` (None: `replicas`), if somebody raises the replicas of the running MPIJob."""

    launcher: Launcher = field(default_factory=Launcher)
    min_workers: int = 1
    max_workers: int | None = None
    network_interface: str | None = None  # None: the interface through which the pods reach each other

    def __post_init__(self) -> None:
        least, most = self.min_workers, self.worker.replicas if self.max_workers is None else self.max_workers
        for name, value in {"min_workers": least, "worker.replicas": self.worker.replicas, "max_workers": most}.items():
            if not isinstance(value, int) or isinstance(value, bool):
                raise ConfigError(name, f"must be a whole number, got {value!r}")
        if not 1 <= least <= self.worker.replicas <= most:
            text = f"is {self.worker.replicas}, and must lie between min_workers {least} (>= 1) and max_workers {most}"
            raise ConfigError("worker.replicas", text)
        if self.launcher.replicas is None and self.num_launcher_replicas is None:
            self.launcher = replace(self.launcher, replicas=1)  # no other number is possible

    def change(self, command: list[str]) -> list[str]:
        """Return the plug-in's command with these numbers, and without its interface, eth0."""
        most = self.worker.replicas if self.max_workers is None else self.max_workers
        given = {"--min-np": self.min_workers * self.slots, "--max-np": most * self.slots}
        words = list(command)
        for option, number in given.items():
            words[words.index(option) + 1] = str(number)
        place = words.index("--network-interface")
        words[place : place + 2] = [] if self.network_interface is None else [words[place], self.network_interface]
        return words


class _ElasticHorovodTask(HorovodFunctionTask):  # type: ignore[misc]
    """Task of an `ElasticHorovodJob`."""

    def _get_horovod_prefix(self) -> list[str]:
        job: ElasticHorovodJob = self.task_config
        return job.change(super()._get_horovod_prefix())

    def get_custom(self, settings: SerializationSettings) -> dict[str, Any]:
        """Return the MPI job; see `following_task`."""
        return following_task(super().get_custom(settings))


TaskPlugins.register_pythontask_plugin(ElasticHorovodJob, _ElasticHorovodTask)
