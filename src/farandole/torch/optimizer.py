"""Optimizer that steps with the gradients of all ranks."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from farandole.core import default
from farandole.core.operations.compression import Compressor
from farandole.core.operations.gradients import (
    GradientOptions,
    even_groups,
    explicit_groups,
    name_parameters,
    predivided,
)
from farandole.core.operations.objects import broadcast_object
from farandole.core.operations.reduction import Adasum, Average, Sum
from farandole.core.process_sets.process_set import ProcessSet, global_process_set, is_alone, require_registered
from farandole.errors import UnsupportedReduction
from farandole.torch.adasum import AdasumFront, Combination
from farandole.torch.front import mix_in
from farandole.torch.insides import HorovodFront
from farandole.torch.low_rank import PowerSGD
from farandole.torch.ops import Compression
from farandole.torch.reducer import Parameter, Reducer
from farandole.torch.second_group import warn_of_second_group


class _Distributed(HorovodFront):
    """Class that `DistributedOptimizer` puts in front of an optimizer's class."""

    _reducer: Reducer
    # A rank that is alone reduces nothing.
    _alone: bool
    _synchronized: bool
    _should_synchronize: bool
    # Gradients were made dense to be reduced, and the optimizer takes sparse ones only.
    _sparse_again: bool

    @property
    def _parameter_names(self) -> dict[Parameter, str]:
        """Names by parameter, under the attribute at which programs for Horovod look."""
        return self._reducer.names

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Reduce after this many backward passes from now on; raises `ValueError` unless positive."""
        self._reducer.set_passes(passes)

    def _passes(self) -> int:
        return self._reducer.passes

    def synchronize(self) -> None:
        """Reduce all gradients, so that they can be read or clipped before `step`.

        Blocks until every rank has taken part. A parameter without a gradient on this rank counts as zeros. Follow it
        by `with optimizer.skip_synchronize(): optimizer.step()`."""
        if not self._alone:
            self._reducer.finish()
            if self._sparse_again:
                _make_sparse(_parameters(self))
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step` use the gradients as they are, because `synchronize` was called before it."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Reduce all gradients, then step; a `closure` is run as often as the optimizer calls it, and reduced each
        time.

        The closure's loss is reduced too, so that an optimizer's use of it, such as a line search, is the same on all
        ranks. Blocks until every rank has taken part."""
        warn_of_second_group()
        if closure is not None and self._should_synchronize:
            closure = self._reducing(closure)
        elif self._should_synchronize:
            self._synchronize_once()
        self._synchronized = False
        return super().step(closure)

    def _reducing(self, closure: Callable[[], float]) -> Callable[[], float]:
        def reduced() -> float:
            loss = closure()
            self.synchronize()
            return loss if self._alone or loss is None else self._reducer.reduce_loss(loss)

        return reduced

    def _synchronize_once(self) -> None:
        if not self._synchronized or self._reducer.started:
            self.synchronize()
            return
        # Reducing twice would not change an average, but would multiply a sum.
        warnings.warn(
            "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). The "
            "gradients are not reduced again; put step() into `with optimizer.skip_synchronize():`.",
            stacklevel=3,
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; raises `AssertionError` while they are being reduced.

        Blocks until every rank has taken part if gradients were read and no step was taken, as by a gradient scaler
        that has found infinities."""
        if self._reducer.looked_at:
            self.synchronize()
        elif self._reducer.started:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        super().zero_grad(set_to_none)
        self._synchronized = False

    def rejoin(self) -> None:
        """Drop all gradients in flight, and prepare for the other ranks that an elastic job has now."""
        self._alone = self._reducer.rejoin()
        self._synchronized = False

    def state_dict(self) -> dict[str, object]:
        """Return the state; with int8 or PowerSGD also this rank's errors, which other optimizers ignore."""
        state = super().state_dict()
        feedback = self._reducer.feedback
        return state if feedback is None else {**state, feedback.key: feedback.state()}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Load, and forget which gradients were being reduced."""
        self._reducer.reset()
        self._synchronized = False
        self._should_synchronize = True
        super().load_state_dict(state_dict)
        feedback = self._reducer.feedback
        if feedback is not None:
            feedback.load(state_dict.get(feedback.key, {}))  # type: ignore[arg-type]  # as saved

    def add_param_group(self, param_group: dict[str, object]) -> None:
        """Add parameters, which are reduced like the others, each on its own."""
        super().add_param_group(param_group)
        added: list[Parameter] = self.param_groups[-1]["params"]
        place = len(self.param_groups) - 1
        names = {parameter: f"allreduce.noname.{place}.{index}" for index, parameter in enumerate(added)}
        self._reducer.add(added, names)


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Parameter]] | None = None,
    compression: Compressor[torch.Tensor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Iterable[Iterable[Parameter]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> torch.optim.Optimizer:
    """Return an optimizer like `optimizer`, of a subclass of its class, that steps with the gradients of all ranks.

    It shares parameters, options and state with `optimizer`, which should no longer be used. Gradients are reduced
    during the backward pass, and `step` waits for them. `Compression.int8` and `PowerSGD(rank)` add what they lose of a
    gradient to the next one; `state_dict` holds these errors, and an elastic job drops them when its ranks change. With
    `backward_passes_per_step`, the gradients of that many passes are added up before they are reduced. `groups`, a
    number or lists of parameters, reduces gradients together. `sparse_as_dense` reduces sparse gradients as dense ones;
    SparseAdam gets them sparse again. With `process_set` its members reduce among themselves, and the others step with
    their own gradients. With op=Adasum each rank steps with its own gradients, and the steps are combined. Raises
    `ValueError` for an optimizer that is distributed already, for parameters without a name, or with a name used twice,
    and for contradictory settings."""
    require_registered(process_set, "DistributedOptimizer")
    if isinstance(compression, PowerSGD) and op not in (Average, Sum):
        raise UnsupportedReduction("gradients", "PowerSGD supports Average and Sum only")
    options = GradientOptions(
        reduction=predivided(op, gradient_predivide_factor),
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )
    if num_groups:
        warnings.warn("num_groups= is deprecated; use groups=", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    names = name_parameters([group["params"] for group in optimizer.param_groups], named_parameters)
    if op == Adasum:
        return _combining(optimizer, names, compression, backward_passes_per_step, groups, process_set)
    held = list(_parameters(optimizer))
    grouped = [[parameter] for parameter in held] if groups is None else _group(held, names, groups, process_set)

    wrapped = mix_in(_Distributed, optimizer)
    wrapped._alone = is_alone(process_set)
    wrapped._synchronized, wrapped._should_synchronize = False, True
    wrapped._sparse_again = sparse_as_dense and isinstance(optimizer, torch.optim.SparseAdam)
    wrapped._reducer = Reducer(names, grouped, backward_passes_per_step, options, attach=not wrapped._alone)
    return wrapped


def _combining(
    optimizer: torch.optim.Optimizer,
    names: dict[Parameter, str],
    compression: Compressor[torch.Tensor],
    passes: int,
    groups: object,
    process_set: ProcessSet,
) -> torch.optim.Optimizer:
    if groups is not None:
        warnings.warn("groups= has no meaning with op=Adasum: every parameter is combined on its own", stacklevel=3)
    wrapped = mix_in(AdasumFront, optimizer)
    wrapped.set_backward_passes_per_step(passes)
    wrapped._alone = is_alone(process_set)
    wrapped._combine = Combination(names, compression, process_set)
    return wrapped


def _group(
    held: list[Parameter],
    names: dict[Parameter, str],
    groups: int | Iterable[Iterable[Parameter]],
    process_set: ProcessSet,
) -> list[list[Parameter]]:
    """Form groups that are equal on all members, for any order of a rank's parameters.

    A rank that joins an elastic job makes its optimizer alone, so there ranks must have one order."""
    trained = [parameter for parameter in held if parameter.requires_grad]
    order, first = [names[parameter] for parameter in held], (process_set.ranks or [0])[0]
    if process_set.included() and not default.is_elastic():
        order = broadcast_object(order, first, process_set=process_set)
    place = {name: index for index, name in enumerate(order)}
    missing = [names[parameter] for parameter in held if names[parameter] not in place]
    if missing:
        raise ValueError(f"rank {first} does not have the parameters {', '.join(missing)} that this rank has")

    def by_place(parameter: Parameter) -> int:
        return place[names[parameter]]

    trained.sort(key=by_place)
    chosen = even_groups(trained, groups) if isinstance(groups, int) else explicit_groups(trained, groups)
    frozen = [[parameter] for parameter in held if not parameter.requires_grad]
    return [sorted(group, key=by_place) for group in chosen] + frozen


def _make_sparse(parameters: Iterable[Parameter]) -> None:
    """Make gradients sparse again, by rows as those of embeddings are."""
    for parameter in parameters:
        if parameter.grad is not None and not parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_sparse(1)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]
