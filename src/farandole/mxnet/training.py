"""Distributed training with MXNet: an optimizer for modules, a trainer for Gluon, and equal starts on all ranks."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import mxnet as mx

from farandole.core.operations import kinds
from farandole.core.operations.compression import Compressor
from farandole.core.operations.gradients import GradientOptions, even_groups, predivided
from farandole.core.operations.reduction import Average, Reduction, Sum
from farandole.core.operations.request import Request
from farandole.core.process_sets.process_set import ProcessSet, global_process_set, membership_of
from farandole.mxnet.adapter import Array
from farandole.mxnet.ops import Compression, allreduce, broadcast_, broadcast_async_, requests

# Of one weight, or of several that are updated together.
Index: TypeAlias = int | str | Sequence[int | str]
Gradient: TypeAlias = Array | Sequence[Array]


@dataclass(frozen=True)
class _Reducer:
    """How gradients are reduced: each by itself, or in `num_groups` groups, of which none begins incomplete."""

    options: GradientOptions[Array]
    num_groups: int

    def __post_init__(self) -> None:
        if self.num_groups < 0:
            raise ValueError(f"num_groups must be >= 0, got {self.num_groups}")

    def reduce(self, gradients: Mapping[str, Array]) -> None:
        """Reduce the gradients, by name, in place. Blocks until every rank has made the same requests."""
        compression = self.options.compression
        smaller = {name: compression.compress(gradient) for name, gradient in gradients.items()}
        names = list(smaller)
        groups = even_groups(names, self.num_groups) if self.num_groups > 0 else [[name] for name in names]
        request = Request(kinds.ALLREDUCE, reduction=self.options.sent, process_set=self.options.process_set)
        handles = [
            requests.start(request.renamed(group[0], grouped=True), [smaller[name][0] for name in group], write=True)
            for group in groups
        ]
        for handle in handles:
            handle.wait()
        for name, (reduced, ctx) in smaller.items():
            if reduced is not gradients[name]:
                gradients[name][:] = compression.decompress(reduced, ctx)


class DistributedOptimizer(mx.optimizer.Optimizer):  # type: ignore[misc]  # MXNet has no types
    """Optimizer that averages each gradient over the ranks before the update; for `mxnet.module`.

    All attributes are those of the optimizer that it wraps."""

    _optimizer: mx.optimizer.Optimizer
    _reducer: _Reducer
    _factor: float

    def __init__(
        self,
        optimizer: mx.optimizer.Optimizer,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        """Wrap `optimizer`. Gradients that are updated together are reduced in `num_groups` groups if it is not 0.

        Raises `ValueError` for a `gradient_predivide_factor` that is not positive."""
        reduction = predivided(Average, gradient_predivide_factor)
        reducer = _Reducer(GradientOptions(reduction=reduction, process_set=process_set), num_groups)
        self.__dict__.update(_optimizer=optimizer, _reducer=reducer, _factor=gradient_predivide_factor)

    def __getattr__(self, name: str) -> object:
        return getattr(self._optimizer, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._optimizer, name, value)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._optimizer, self._factor, self._reducer.num_groups, self._reducer.options.process_set)

    def create_state(self, index: object, weight: object) -> object:
        """Return the wrapped optimizer's state for a weight."""
        return self._optimizer.create_state(index, weight)

    def create_state_multi_precision(self, index: object, weight: object) -> object:
        """Return the wrapped optimizer's state for a weight, of float32 for one of float16."""
        return self._optimizer.create_state_multi_precision(index, weight)

    def update(self, index: Index, weight: object, grad: Gradient, state: object) -> None:
        """Average the gradient, or the list of gradients, in place, and update the weights."""
        self._average(index, grad)
        self._optimizer.update(index, weight, grad, state)

    def update_multi_precision(self, index: Index, weight: object, grad: Gradient, state: object) -> None:
        """Do as `update`, with weights of float16 kept as float32."""
        self._average(index, grad)
        self._optimizer.update_multi_precision(index, weight, grad, state)

    def set_learning_rate(self, lr: float) -> None:
        """Set the wrapped optimizer's learning rate."""
        self._optimizer.set_learning_rate(lr)

    def set_lr_mult(self, args_lr_mult: Mapping[object, float]) -> None:
        """Set the factors of learning rates by parameter."""
        self._optimizer.set_lr_mult(args_lr_mult)

    def set_wd_mult(self, args_wd_mult: Mapping[object, float]) -> None:
        """Set the factors of weight decay by parameter."""
        self._optimizer.set_wd_mult(args_wd_mult)

    def _average(self, index: Index, gradient: Gradient) -> None:
        pairs = zip(index, gradient, strict=True) if isinstance(index, list | tuple) else [(index, gradient)]
        names = self._optimizer.idx2name
        self._reducer.reduce({str(names.get(each, each)): one for each, one in pairs})


class DistributedTrainer(mx.gluon.Trainer):  # type: ignore[misc]  # MXNet has no types
    """Trainer of Gluon that sums the gradients over the ranks, and divides the step by their number."""

    def __init__(
        self,
        params: object,
        optimizer: str | mx.optimizer.Optimizer,
        optimizer_params: Mapping[str, object] | None = None,
        compression: Compressor[Array] = Compression.none,
        gradient_predivide_factor: float = 1.0,
        prefix: str | None = None,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        """Train the parameters, a dict or a sequence of them, each in one context.

        A gradient's name is its parameter's place, after `prefix`, which tells apart trainers that step at the same
        time. Gradients are reduced in `num_groups` groups if it is not 0. Between `allreduce_grads` and `update` they
        are sums. A gradient that is stale (no backward pass since the last step) on this rank counts as zero; with
        `ignore_stale_grad` a step updates the parameters whose gradient is fresh on any rank. Raises `ValueError` for
        sparse gradients and for a `gradient_predivide_factor` that is not positive, `InvalidRequest` if this rank is
        not in `process_set`, and in steps `ValueError` for parameters in several contexts."""
        if isinstance(optimizer, DistributedOptimizer):
            warnings.warn(
                "DistributedTrainer reduces gradients itself; the DistributedOptimizer is unwrapped", stacklevel=2
            )
            optimizer = optimizer._optimizer
        super().__init__(params, optimizer, optimizer_params, kvstore=None)
        self._prefix = prefix or ""
        if sparse := [each.name for each in self._trained().values() if each._grad_stype != "default"]:
            raise ValueError(f"{', '.join(sparse)}: gradients must be dense; make the layers with sparse_grad=False")
        _, divide, multiply = predivided(Average, gradient_predivide_factor)
        self._scale *= multiply / membership_of(process_set, "DistributedTrainer").size
        options = GradientOptions(reduction=Reduction(Sum, divide), compression=compression, process_set=process_set)
        self._reducer = _Reducer(options, num_groups)

    def _trained(self) -> dict[str, mx.gluon.Parameter]:
        return {f"{self._prefix}{i}": each for i, each in enumerate(self._params) if each.grad_req != "null"}

    def _allreduce_grads(self) -> None:
        trained = self._trained()
        if any(len(each.list_grad()) > 1 for each in trained.values()):
            raise ValueError("a rank trains in one context; start a rank for each context of the parameters")
        for each in trained.values():
            if not each.data()._fresh_grad:
                each.grad()[:] = 0  # it holds the sum of an earlier step
        self._reducer.reduce({name: each.grad() for name, each in trained.items()})

    def _update(self, ignore_stale_grad: bool = False) -> None:
        if ignore_stale_grad:
            arrays = [each.data() for each in self._trained().values()]
            fresh = mx.nd.array([each._fresh_grad for each in arrays], dtype="int32")
            process_set = self._reducer.options.process_set
            counts = allreduce(fresh, op=Sum, name=f"{self._prefix}fresh", process_set=process_set)
            for each, count in zip(arrays, counts.asnumpy(), strict=True):
                each._fresh_grad = bool(count)
        super()._update(ignore_stale_grad)


def broadcast_parameters(
    params: Mapping[str, Array | mx.gluon.Parameter], root_rank: int = 0, prefix: str | None = None
) -> None:
    """Overwrite parameters with those of rank `root_rank`: the dict of a block or of a module, by name.

    Blocks until all of the root's values have arrived. A parameter whose shape is not known yet is broadcast when its
    first values are made. Names begin with `prefix`. Raises `ValueError` for anything but a dict."""
    if not hasattr(params, "items"):  # MXNet 1.9's ParameterDict is no mapping
        raise ValueError(f"invalid params of type: {type(params).__name__}; pass a dict of parameters or arrays")
    handles = []
    for name, each in sorted(params.items()):
        name = f"{prefix or ''}{name}"
        try:
            array = each.data() if isinstance(each, mx.gluon.Parameter) else each
        except mx.gluon.parameter.DeferredInitializationError:
            _broadcast_when_made(each, root_rank, name)
        else:
            handles.append(broadcast_async_(array, root_rank, name))
    for handle in handles:
        handle.wait()


def _broadcast_when_made(parameter: mx.gluon.Parameter, root_rank: int, name: str) -> None:
    initialize = parameter._init_impl

    def initialize_equally(*args: object) -> None:
        # This function, unless a later call has replaced it: later values are the program's own affair.
        parameter.__dict__.pop("_init_impl", None)
        initialize(*args)
        broadcast_(parameter.data(), root_rank, name)

    parameter._init_impl = initialize_equally
