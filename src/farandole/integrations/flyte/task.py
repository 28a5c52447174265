"""Task configuration `Farandole` and its task type, which Flyte's MPI plug-in runs on the cluster."""

import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from flytekit import Deck, FlyteContext, FlyteContextManager, Resources
from flytekit.configuration import SerializationSettings
from flytekit.core.type_engine import TypeEngine
from flytekit.deck.deck import _output_deck
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.extend import TaskPlugins
from flytekit.models.literals import LiteralMap
from flytekitplugins.kfmpi import Launcher, MPIJob, RestartPolicy, RunPolicy, Worker
from flytekitplugins.kfmpi.task import MPIFunctionTask

from farandole.config import Config
from farandole.cores import available_cores
from farandole.errors import ConfigError, HostsError
from farandole.integrations.flyte.ranks import (
    FlyteCall,
    Outcome,
    TaskLocations,
    folder_of,
    run_on_rank,
    runs_in_cluster,
)
from farandole.integrations.flyte.worker_resources import following_task
from farandole.launch.backend import Backend, Binding, Call, check_binding
from farandole.launch.backends import reach, variables_of_ranks
from farandole.launch.backends.local import LocalBackend
from farandole.launch.backends.mpi_operator import OperatorJob
from farandole.launch.backends.ssh import Ssh
from farandole.launch.environment import checked_variables, with_settings
from farandole.launch.job import open_job
from farandole.launch.output import Output
from farandole.launch.pickling import dump, dump_call

_LITERALS = "literals"


@dataclass(frozen=True, kw_only=True)
class Farandole:
    """Configuration of a task whose function runs on ranks, each a process; rank 0's value is the task's output.

    `num_workers` pods run `slots` ranks each. If fewer pods are ready within `start_timeout`, but at least
    `min_workers`, the task starts with these; a retry counts the pods anew. `requests` and `limits` are for a worker's
    pod, by default those of `@task`; `launcher_requests` and `launcher_limits` are for the pod that starts the ranks.
    With `restart` that pod is restarted if it is lost, and its ranks read rank 0's latest checkpoint. A local execution
    runs `local_ranks` ranks; None: as many as in the cluster, but at most one per core, or two on a single core.
    """

    num_workers: int
    min_workers: int | None = None
    slots: int = 1
    requests: Resources | None = None
    limits: Resources | None = None
    launcher_requests: Resources | None = None
    launcher_limits: Resources | None = None
    image: str | None = None  # of the workers; None: the task's
    run_policy: RunPolicy | None = None
    restart: bool = False
    env: Mapping[str, str] = field(default_factory=dict)  # of the ranks
    binding: Binding = "none"
    start_timeout: timedelta | float | None = None  # None: FARANDOLE_START_TIMEOUT
    network_interface: str | None = None  # None: the interface through which the pods reach each other
    local_ranks: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_workers", "min_workers", "slots", "local_ranks"):
            value = getattr(self, name)
            if value is None and name in ("min_workers", "local_ranks"):
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise ConfigError(name, f"must be a whole number, got {value!r}")
            if value < 1:
                raise ConfigError(name, f"must be >= 1, got {value}")
        for name in ("requests", "limits", "launcher_requests", "launcher_limits"):
            value = getattr(self, name)
            if not isinstance(value, Resources | None):
                raise ConfigError(name, f"must be flytekit's Resources(cpu=..., mem=...), got {value!r}")
        checked_variables(self.env)
        check_binding(self.binding)
        Config.from_environment(self.env, **self._given())  # checks the settings when the task is defined
        if self.min_workers is not None and self.min_workers > self.num_workers:
            raise ConfigError("min_workers", f"is {self.min_workers}, but num_workers is {self.num_workers}")

    def mpi_job(self) -> MPIJob:
        """Return the configuration of the MPI plug-in for these pods."""
        worker = Worker(replicas=self.num_workers, image=self.image, requests=self.requests, limits=self.limits)
        launcher = Launcher(
            replicas=1,
            requests=self.launcher_requests,
            limits=self.launcher_limits,
            restart_policy=RestartPolicy.FAILURE if self.restart else None,
        )
        return MPIJob(worker=worker, launcher=launcher, slots=self.slots, run_policy=self.run_policy)

    def ranks_here(self) -> int:
        """Return the number of ranks of a local execution."""
        if self.local_ranks is not None:
            return self.local_ranks
        return min(self.num_workers * self.slots, max(2, available_cores()))

    def settings(self) -> tuple[Config, dict[str, timedelta | float | str]]:
        """Return the launcher's settings, and the settings that this configuration gives."""
        given = self._given()
        return Config.from_environment({**os.environ, **self.env}, **given), given

    def _given(self) -> dict[str, timedelta | float | str]:
        given: dict[str, timedelta | float | str] = {}
        if self.start_timeout is not None:
            given["start_timeout"] = self.start_timeout
        if self.network_interface is not None:
            given["interface"] = self.network_interface
        return given


class FarandoleTask(MPIFunctionTask):  # type: ignore[misc]  # flytekit has no types
    """Task of type "mpi", version 1, whose launcher's pod starts the ranks without mpirun."""

    def __init__(self, task_config: Farandole, task_function: Callable[..., object], **kwargs: object) -> None:
        super().__init__(task_config=task_config.mpi_job(), task_function=task_function, **kwargs)
        self.farandole = task_config
        worker = self.task_config.worker
        if worker.requests or worker.limits:  # else workers follow the task, see `get_custom`
            worker.requests = worker.requests or self.resources.requests
            worker.limits = worker.limits or self.resources.limits

    def get_custom(self, settings: SerializationSettings) -> dict[str, Any]:
        """Return the MPI job; see `following_task`."""
        return following_task(super().get_custom(settings))

    def get_command(self, settings: SerializationSettings) -> list[str]:
        """Return the command of the launcher's pod, which is Flyte's own, because `execute` starts the ranks."""
        command: list[str] = self._get_base_command(settings)
        return command

    def _literal_map_to_python_input(self, literal_map: LiteralMap, ctx: FlyteContext) -> dict[str, object]:
        # Ranks convert the inputs themselves, so the launcher reads no data.
        return {_LITERALS: literal_map}

    def execute(self, **kwargs: object) -> object:
        """Run the function on all ranks; return rank 0's outputs, which rank 0 has uploaded.

        The outputs are Python values if the inputs are, as with `map_task`, and literals otherwise. Rank 0's decks are
        added to the task's. Raises `RankFailed`, or `FlyteRecoverableException` if a retry may help: if the rank's
        process or host was lost, if all that failed are ranks that miss another one, if pods cannot be used, or if the
        rank raised that error. Raises `IgnoreOutputs` if rank 0 raised it."""
        ctx = FlyteContextManager.current_context()
        literals = kwargs.get(_LITERALS)
        if isinstance(literals, LiteralMap):
            return self._run(ctx, literals)
        outputs = self._run(ctx, TypeEngine.dict_to_literal_map(ctx, kwargs, self.python_interface.inputs))
        found = TypeEngine.literal_map_to_kwargs(ctx, outputs, self.python_interface.outputs)
        values = tuple(found[name] for name in self.python_interface.outputs)
        return values if len(values) > 1 else next(iter(values), None)

    def _run(self, ctx: FlyteContext, literals: LiteralMap) -> LiteralMap:
        try:
            return self._run_ranks(ctx, literals)
        except HostsError as error:
            raise FlyteRecoverableException(str(error)) from error  # the pods of the next attempt are new ones

    def _run_ranks(self, ctx: FlyteContext, literals: LiteralMap) -> LiteralMap:
        settings, given = self.farandole.settings()
        backend, ranks = self._backend(ctx, settings)
        environment = with_settings(variables_of_ranks({**os.environ, **self.farandole.env}), settings, given)
        task = Call(self._call(ctx, literals), sys.executable, settings.start_timeout, keep_all=False)
        with (
            Output(ranks) as output,
            open_job(ranks, environment, backend=backend, binding=self.farandole.binding) as job,
        ):
            failure = job.run(task, output)
            if failure is None:
                outcome: Outcome = pickle.loads(job.values()[0])
                self._show(ctx, outcome.decks)
                return outcome.outputs()
        error = failure.error()
        # A rank may find that a pod does not answer before this launcher does: then its PeerLost is the first failure.
        if failure.killed or failure.consequence or isinstance(failure.cause, FlyteRecoverableException):
            raise FlyteRecoverableException(str(error)) from error
        raise error from failure.cause

    def _show(self, ctx: FlyteContext, decks: Sequence[tuple[str, str]]) -> None:
        """Add rank 0's decks to the task's decks, and write them in a local execution, where flytekit does not."""
        if not self.enable_deck or ctx.user_space_params is None:
            return
        for name, html in decks:
            Deck(name, html)
        if not runs_in_cluster(ctx):
            _output_deck(self.name.split(".")[-1], ctx.user_space_params)

    def _backend(self, ctx: FlyteContext, settings: Config) -> tuple[Backend, int]:
        """Return the launch backend of the ranks, and the number of ranks."""
        if not runs_in_cluster(ctx):
            ranks = self.farandole.ranks_here()
            return LocalBackend(ranks), ranks
        job = OperatorJob.find()
        if job is None:
            raise ConfigError("task_config", "this pod is no launcher of an MPI job; is Flyte's MPI plug-in enabled?")
        most = self.farandole.num_workers
        least = self.farandole.min_workers or most
        pods = job.wait_for_workers(least, most, settings.start_timeout)
        ranks = sum(pod.slots for pod in pods)
        return reach(pods, ranks, job.shell(Ssh(), settings.start_timeout), settings.interface), ranks

    def _call(self, ctx: FlyteContext, literals: LiteralMap) -> bytes:
        variables = {name: each.to_flyte_idl() for name, each in self.interface.outputs.items()}
        call = FlyteCall(
            name=self.name,
            function=self.task_function,
            inputs=dict(self.python_interface.inputs),
            outputs=dict(self.python_interface.outputs),
            variables={name: each.SerializeToString() for name, each in variables.items()},
            in_tuple=bool(self.python_interface.output_tuple_name),
            literals=literals.to_flyte_idl().SerializeToString(),
        )
        return dump_call(run_on_rank, (TaskLocations.of(ctx), folder_of(self.task_function), dump(call, self.name)), {})


TaskPlugins.register_pythontask_plugin(Farandole, FarandoleTask)
