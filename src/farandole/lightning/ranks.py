"""Lightning's strategy and cluster environment for the ranks of a farandole job, for each of Lightning's packages."""

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torchmetrics import Metric

import farandole.torch as hvd
from farandole.core.operations.compression import Compressor
from farandole.core.operations.gradients import GradientOptions
from farandole.errors import ConfigError
from farandole.lightning.packages import FABRICS
from farandole.lightning.stepping import stepping
from farandole.torch.reducer import Reducer

T = TypeVar("T")

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    _Base = Any
else:
    _Base = object

_OPERATIONS = {
    "mean": hvd.Average,
    "avg": hvd.Average,
    "sum": hvd.Sum,
    "min": hvd.Min,
    "max": hvd.Max,
    "product": hvd.Product,
}


@functools.cache
def strategy_class(package: ModuleType, strategy: type["OverRanks"] | None = None) -> Any:
    """Return the strategy for a package of Lightning: `OverRanks`, or a subclass of it, on the package's base class."""
    if package.__name__ not in FABRICS:
        raise ConfigError("package", f"must be one of {', '.join(FABRICS)}, got {package.__name__}")
    environments = importlib.import_module(f"{FABRICS[package.__name__]}.plugins.environments")
    environment = type("FarandoleEnvironment", (_Places, environments.LightningEnvironment), {})
    bases = (strategy or OverRanks, package.strategies.ParallelStrategy)
    return type("FarandoleStrategy", bases, {"environment": environment, "__doc__": OverRanks.__doc__})


class _Places(_Base):  # type: ignore[misc]  # its other base is the package's
    """Cluster environment of Lightning: size, rank, local rank and node rank of this process."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return hvd.size()

    def set_world_size(self, size: int) -> None:
        """Do nothing: the launcher has set it."""

    def global_rank(self) -> int:
        return hvd.rank()

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the launcher has set it."""

    def local_rank(self) -> int:
        return hvd.local_rank()

    def node_rank(self) -> int:
        return hvd.cross_rank()

    def teardown(self) -> None:
        """Keep the launcher's variables."""


class OverRanks(_Base):  # type: ignore[misc]  # its other base is the package's
    """Strategy for the ranks of a farandole job: `Trainer(accelerator="cpu", strategy=FarandoleStrategy())`, or "gpu".

    Gradients are averaged over ranks during the backward pass. `on_after_backward` and later hooks see the averages. A
    parameter without a gradient on this rank counts as zeros. `self.log(..., sync_dist=True)`, metrics of torchmetrics
    that the module or a callback has when a stage starts, and `self.all_gather` use the values of all ranks. All ranks
    get rank 0's weights when training starts or an optimizer gets them, and rank 0's running statistics (BatchNorm)
    when a validation starts.

    `rate_factor` multiplies the learning rates while an optimizer steps; schedulers, callbacks and checkpoints see the
    rates without it. None is the number of ranks. `compression` is for gradients. The constructor of `Trainer` calls
    `init()` and blocks until all ranks have called it. The launcher starts the ranks: the constructor raises
    `ConfigError` for other numbers in `devices`, which may also be 1 or all GPUs, and in `num_nodes`."""

    strategy_name = "farandole"
    is_distributed = True
    num_nodes = 1  # Lightning sets the trainer's
    environment: Callable[[], object]

    def __init__(
        self,
        *,
        rate_factor: float | None = 1.0,
        compression: Compressor[Tensor] = hvd.Compression.none,
        **options: object,
    ) -> None:
        if rate_factor is not None and not rate_factor > 0:
            raise ConfigError("rate_factor", f"must be > 0, got {rate_factor}")
        super().__init__(cluster_environment=self.environment(), **options)
        self._rate_factor, self._options = rate_factor, GradientOptions(compression=compression)
        self._reducer: Reducer | None = None
        self._reduced: set[int] = set()  # the reducer's parameters, by id

    def set_world_ranks(self) -> None:
        """Join the job; the constructor of `Trainer` calls it."""
        if not hvd.is_initialized():
            hvd.init()
        # Both packages use this decorator for functions of rank 0. At import it guesses the rank from the environment.
        from lightning_utilities.core.rank_zero import rank_zero_only

        rank_zero_only.rank = hvd.rank()  # type: ignore[attr-defined]  # a variable of a function
        self._check_places()

    def _check_places(self) -> None:
        """Raise `ConfigError` if the trainer asks for other ranks than the launcher has started."""
        asked, here, size = len(self.parallel_devices or ()), hvd.local_size(), hvd.size()
        # By default Lightning gives all GPUs of the host.
        is_default = size > 1 and self.parallel_devices[0].type == "cuda" and asked == torch.cuda.device_count()
        if asked > 1 and asked != here and not is_default:
            remedy = f"start it with `farandole run -np {asked} python ...`, or set devices=1"
            raise ConfigError("devices", f"asks for {asked} ranks on this host, and the job has {here} here; {remedy}")
        if self.num_nodes > 1 and hvd.is_homogeneous() and self.num_nodes != hvd.cross_size():
            raise ConfigError(
                "num_nodes",
                f"asks for {self.num_nodes} hosts, and the job has {hvd.cross_size()}; leave it out, and name the "
                "hosts to the launcher, as in `farandole run -H host1:2,host2:2 python ...`",
            )

    @property
    def root_device(self) -> torch.device:
        """The device of this rank: with accelerator="gpu" the GPU at its local rank, unless `devices` names another."""
        gpus = [device for device in self.parallel_devices or () if device.type == "cuda"]
        return gpu_of_rank(gpus, hvd.local_rank(), torch.cuda.device_count()) if gpus else torch.device("cpu")

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        return {"num_replicas": hvd.size(), "rank": hvd.rank()}

    def model_to_device(self) -> None:
        self.model.to(self.root_device)

    def setup(self, trainer: "Trainer") -> None:
        """Give all ranks rank 0's weights, and hook the parameters."""
        super().setup(trainer)
        module = self.lightning_module
        if trainer.state.fn == "fit" and hvd.size() > 1:
            hvd.broadcast_parameters(module.state_dict(), root_rank=0)
            names = {parameter: name for name, parameter in module.named_parameters()}
            self._reducer = Reducer(names, [[parameter] for parameter in names], 1, self._options)
            self._reduced = set(map(id, names))

    def on_train_start(self) -> None:
        """Let metrics use the values of all ranks."""
        super().on_train_start()
        self._connect_metrics()

    def on_validation_start(self) -> None:
        """Give all ranks rank 0's running statistics, and let metrics use the values of all ranks."""
        super().on_validation_start()
        self._connect_metrics()
        if _available():
            self.broadcast_buffers()

    def on_test_start(self) -> None:
        """Let metrics use the values of all ranks."""
        super().on_test_start()
        self._connect_metrics()

    def on_predict_start(self) -> None:
        """Let metrics use the values of all ranks."""
        super().on_predict_start()
        self._connect_metrics()

    def _connect_metrics(self) -> None:
        # By default torchmetrics looks for a process group of torch, and without one counts this rank's values only.
        module = self.lightning_module
        for metric in _metrics_of(module, *module.trainer.callbacks):
            metric.distributed_available_fn = _available
            metric.dist_sync_fn = gather

    def teardown(self) -> None:
        """Unhook the parameters, so that a backward pass after the training does not communicate."""
        self._reducer = None
        super().teardown()

    def broadcast_buffers(self) -> None:
        """Give all ranks rank 0's buffers, such as running statistics; a collective."""
        hvd.broadcast_parameters(dict(self.lightning_module.named_buffers()), root_rank=0)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank, without reducing them, within the block."""
        if self._reducer is not None:
            self._reducer.paused = True
        try:
            yield
        finally:
            if self._reducer is not None:
                self._reducer.paused = False

    def training_step(self, *args: object, **kwargs: object) -> object:
        """Run the module's step; parameters that optimizers have got since the last one begin as rank 0's."""
        self._include_new_parameters()
        return super().training_step(*args, **kwargs)

    def backward(
        self, closure_loss: Tensor, optimizer: torch.optim.Optimizer | None, *args: object, **kwargs: object
    ) -> Tensor:
        """Run the backward pass, and block until the gradients are reduced; hooks and clipping run after that."""
        module, precision = self.lightning_module, self.precision_plugin
        self.pre_backward(closure_loss)
        closure_loss = precision.pre_backward(closure_loss, module)
        precision.backward(closure_loss, module, optimizer, *args, **kwargs)
        self._finish()
        closure_loss = precision.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    def _include_new_parameters(self) -> None:
        """Reduce parameters that optimizers got after `setup`, as hooks may add layers; all ranks get rank 0's.

        Not between forward and backward pass, which would miss the weights that it has used."""
        if self._reducer is None:
            return
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        new = {id(each): each for group in groups for each in group["params"] if id(each) not in self._reduced}
        if new:
            parameters, begin = list(new.values()), len(self._reduced)
            names = {parameter: f"added.{begin + place}" for place, parameter in enumerate(parameters)}
            hvd.broadcast_parameters([(names[parameter], parameter) for parameter in parameters], root_rank=0)
            self._reducer.add(parameters, names)
            self._reduced |= new.keys()

    def _finish(self) -> None:
        reducer = self._reducer
        if reducer is not None and not reducer.paused:
            reducer.finish()

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], object],
        model: "LightningModule | None" = None,
        **kwargs: object,
    ) -> object:
        """Step with the rates times `rate_factor`."""

        def run() -> object:
            loss = closure()
            if self._reducer is not None and self._reducer.started:
                self._finish()  # the closure ran a backward pass without the strategy
            return loss

        factor = hvd.size() if self._rate_factor is None else self._rate_factor
        with stepping(optimizer, factor, self.reduce if self._reducer is not None else None):
            return super().optimizer_step(optimizer, run, model, **kwargs)

    def reduce(self, tensor: object, group: object = None, reduce_op: object = "mean") -> object:
        """Return `tensor` reduced over all ranks, by "mean" by default; other objects are returned unchanged."""
        if not isinstance(tensor, Tensor) or self._failed:
            return tensor
        name = str(reduce_op).rpartition(".")[2].lower()
        if name not in _OPERATIONS:
            raise ConfigError("reduce_op", f"must be one of {', '.join(_OPERATIONS)}, got {reduce_op}")
        op = _OPERATIONS[name]
        if op == hvd.Average and not tensor.is_floating_point():
            tensor = tensor.double()  # a mean of integers is not an integer
        return hvd.allreduce(tensor.detach().contiguous(), op=op)

    def barrier(self, name: str | None = None) -> None:
        """Block until every rank has called it; do nothing if this rank has failed, as others may not call it then."""
        if not self._failed:
            hvd.barrier()

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return the object of rank `src`; if this rank has failed, its own object."""
        return obj if self._failed else hvd.broadcast_object(obj, root_rank=src)

    @property
    def _failed(self) -> bool:
        """Return whether this rank has failed; callbacks then only clean up."""
        module = self.lightning_module
        return module is not None and module._trainer is not None and bool(module.trainer.interrupted)

    def all_gather(self, tensor: Tensor, group: object = None, sync_grads: bool = False) -> Tensor:
        """Return the tensors of all ranks along a new first dimension; `sync_grads` lets gradients flow back."""
        return hvd.allgather((tensor if sync_grads else tensor.detach()).contiguous().unsqueeze(0))


def gpu_of_rank(given: Sequence[torch.device], local_rank: int, count: int) -> torch.device:
    """Return the GPU of a rank from the GPUs `given` to the trainer, on a host with `count` visible GPUs.

    Several GPUs are assigned by local rank. A single GPU 0 may mean devices=1, so each rank gets the GPU at its local
    rank."""
    only = given[0]
    if len(given) > 1:
        return given[local_rank % len(given)]
    return torch.device("cuda", local_rank) if only.index == 0 and local_rank < count else only


def gather(tensor: Tensor, group: object = None) -> list[Tensor]:
    """Return the tensors of all ranks, whose shapes may differ, on the device of `tensor`; a collective."""
    # A pickled tensor of a GPU is restored on the sender's GPU, and a view with all memory of its base.
    copies = hvd.allgather_object(tensor.detach().to("cpu", copy=True))
    return [copy.to(tensor.device) for copy in copies]


def _metrics_of(*owners: object) -> Iterator[Metric]:
    """Yield the metrics among the attributes of a module and of callbacks, also in lists and dictionaries."""
    for value in chain.from_iterable(vars(owner).values() for owner in owners):
        held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        for each in held:
            if isinstance(each, torch.nn.Module):
                yield from (part for part in each.modules() if isinstance(part, Metric))


def _available() -> bool:
    return hvd.is_initialized() and hvd.size() > 1
