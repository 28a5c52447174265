"""Optimizers that step on their own, and reduce parameters once in many steps, for slow links."""

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from farandole.core.operations.compression import Compressor
from farandole.core.operations.reduction import Average
from farandole.core.process_sets.process_set import ProcessSet, global_process_set, require_registered
from farandole.torch.front import Front, mix_in
from farandole.torch.ops import Compression, broadcast_async_, grouped_allreduce, grouped_allreduce_

STATE = "local_steps"  # key in a state_dict


class _Local(Front):
    """Class that `LocalSGD` puts in front of an optimizer's class."""

    _every: int
    _steps: int  # since the last synchronization
    _process_set: ProcessSet
    _step_supports_amp_scaling = True  # so that a gradient scaler calls `step` also when it skips this rank's update

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step with this rank's gradients; the last of `sync_every` steps calls `synchronize`."""
        loss = self._step_alone(closure)
        self._steps += 1
        if self._steps >= self._every:
            self.synchronize()
        return loss

    def _step_alone(self, closure: Callable[[], float] | None) -> float | None:
        """Step, unless a gradient scaler has found infinite gradients, which other ranks need not have."""
        found, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        inherits = getattr(super(), "_step_supports_amp_scaling", False)
        if found is None or inherits or "_step_supports_amp_scaling" in vars(self):  # the last for fused optimizers
            return super().step(closure)
        if found.item():
            return None
        if scale is not None:
            for parameter in self._given():
                if parameter.grad is not None:
                    parameter.grad.div_(scale.item())
        self.found_inf = self.grad_scale = None  # the scaler deletes them
        return super().step(closure)

    def synchronize(self) -> None:
        """Make the parameters equal on all ranks, and begin to count steps anew.

        Blocks until every rank has taken part. Does nothing on a rank outside of the process set."""
        self._steps = 0
        if self._process_set.included():
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        grouped_allreduce_(list(self._parameters()), op=Average, name="local_sgd", process_set=self._process_set)

    def _given(self) -> Iterator[torch.Tensor]:
        for group in self.param_groups:
            yield from group["params"]

    def _parameters(self) -> Iterator[torch.Tensor]:
        return map(torch.Tensor.detach, self._given())

    def rejoin(self) -> None:
        """Keep the counts: an elastic job gives its new ranks the state of an old one."""

    def state_dict(self) -> dict[str, object]:
        """Return the state, with the steps since the last synchronization; other optimizers ignore these."""
        return {**super().state_dict(), STATE: self._steps}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Load the state, also one of an optimizer of another class."""
        super().load_state_dict(state_dict)
        steps: int = state_dict.get(STATE, 0)  # type: ignore[assignment]  # as saved
        self._steps = steps


class _Outer(_Local):
    """Class that `DiLoCo` puts in front of an optimizer's class."""

    _kept: list[torch.Tensor]  # the parameters after the last synchronization, equal on all ranks
    _outer: torch.optim.SGD  # steps on `_kept`
    _compression: Compressor[torch.Tensor]
    _agreed: bool  # the ranks have compared `_kept`

    def rejoin(self) -> None:
        """Compare the common parameters with those of the new ranks before the next exchange."""
        self._agreed = False

    @torch.no_grad()
    def _exchange(self) -> None:
        if not self._agreed:
            # Programs broadcast the parameters after they have made the optimizer, as with DistributedOptimizer.
            root = (self._process_set.ranks or [0])[0]
            names = (f"diloco.common.{place}" for place in range(len(self._kept)))
            started = [broadcast_async_(each, root, next(names), self._process_set) for each in self._kept]
            for handle in started:
                handle.wait()
            self._agreed = True
        here = list(self._parameters())
        moved = [kept - parameter for kept, parameter in zip(self._kept, here, strict=True)]
        averages = grouped_allreduce(
            moved, name="diloco", compression=self._compression, op=Average, process_set=self._process_set
        )
        for kept, average in zip(self._kept, averages, strict=True):
            kept.grad = average
        self._outer.step()
        self._outer.zero_grad()
        for kept, parameter in zip(self._kept, here, strict=True):
            parameter.copy_(kept)

    def state_dict(self) -> dict[str, object]:
        """Return the state, with that of the outer optimizer and the parameters on which it steps."""
        return {**super().state_dict(), "outer": self._outer.state_dict(), "kept": list(self._kept)}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Load the state; that of an optimizer of another class leaves the outer optimizer as it is."""
        super().load_state_dict(state_dict)
        if "outer" in state_dict:
            self._outer.load_state_dict(state_dict["outer"])  # type: ignore[arg-type]  # as saved
            held: list[torch.Tensor] = state_dict["kept"]  # type: ignore[assignment]  # as saved
            for kept, value in zip(self._kept, held, strict=True):
                kept.copy_(value)

    def add_param_group(self, param_group: dict[str, object]) -> None:
        """Add parameters."""
        super().add_param_group(param_group)
        added = [parameter.clone() for parameter in list(self._parameters())[len(self._kept) :]]
        self._kept += added
        self._agreed = False
        self._outer.add_param_group({"params": added})


F = TypeVar("F", bound=_Local)


def LocalSGD(
    optimizer: torch.optim.Optimizer, sync_every: int, process_set: ProcessSet = global_process_set
) -> torch.optim.Optimizer:
    """Return an optimizer like `optimizer`, of a subclass of its class, that averages parameters, not gradients.

    Each rank steps with its own gradients; after each `sync_every` steps the parameters become the average of all
    ranks', which is one allreduce (Stich, "Local SGD Converges Fast and Communicates Little", 2019). Other state, such
    as momentum, stays the rank's own. Every rank must make equally many steps. The result shares parameters and state
    with `optimizer`, which should no longer be used; `synchronize` averages at once, for example before an evaluation.
    Raises `ValueError` if `sync_every` is no positive integer."""
    return _local(_Local, optimizer, sync_every, process_set)


def DiLoCo(
    optimizer: torch.optim.Optimizer,
    sync_every: int,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    compression: Compressor[torch.Tensor] = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> torch.optim.Optimizer:
    """Return an optimizer like `LocalSGD`, that makes an outer step with the average of the ranks' moves.

    After each `sync_every` steps, what each rank has moved away from the last common parameters is averaged and taken
    as a gradient of them, for SGD with Nesterov momentum (Douillard et al., "DiLoCo: Distributed Low-Communication
    Training of Language Models", 2023). The first exchange takes over the common parameters of the first rank, as they
    were when it was made. It holds two more copies of the parameters. `compression` makes the moves smaller.
    Raises `ValueError` if `sync_every` is no positive integer."""
    wrapped = _local(_Outer, optimizer, sync_every, process_set)
    wrapped._kept = [parameter.clone() for parameter in wrapped._parameters()]
    wrapped._outer = torch.optim.SGD(wrapped._kept, outer_lr, outer_momentum, nesterov=outer_momentum > 0)
    wrapped._compression, wrapped._agreed = compression, False
    return wrapped


def _local(front: type[F], optimizer: torch.optim.Optimizer, sync_every: int, process_set: ProcessSet) -> F:
    require_registered(process_set, "LocalSGD")
    if not isinstance(sync_every, int) or sync_every <= 0:
        raise ValueError(f"sync_every must be an integer > 0, got {sync_every!r}")
    wrapped = mix_in(front, optimizer)
    wrapped._every, wrapped._steps, wrapped._process_set = sync_every, 0, process_set
    return wrapped
