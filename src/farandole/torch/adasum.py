"""Optimizer whose steps are combined over the ranks by Adasum: DistributedOptimizer(op=Adasum).

Each rank steps with its own gradients, and Adasum combines the steps, with momentum, learning rate and all. If Adasum
combined the gradients, an optimizer such as Adam would undo the scale."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch

from farandole.core.operations.compression import Compressor
from farandole.core.operations.reduction import Adasum, Max
from farandole.core.process_sets.process_set import ProcessSet, is_alone
from farandole.torch.insides import HorovodFront
from farandole.torch.ops import allreduce, allreduce_async_
from farandole.torch.second_group import warn_of_second_group

Parameter = torch.Tensor


@dataclass(frozen=True)
class Combination:
    """Settings for combining the ranks' steps."""

    names: dict[Parameter, str]
    compression: Compressor[torch.Tensor]
    process_set: ProcessSet

    def __call__(self, starts: dict[Parameter, torch.Tensor]) -> None:
        """Replace each parameter by its start plus the ranks' combined steps; restore the start if that fails."""
        failed: list[Exception] = []
        underway: list[tuple[Parameter, Callable[[], torch.Tensor]]] = []
        for parameter, start in starts.items():
            try:
                underway.append((parameter, self._start(parameter, parameter.detach() - start)))
            except Exception as error:
                failed.append(error)
        combined: list[tuple[Parameter, torch.Tensor]] = []
        for parameter, wait in underway:
            try:
                combined.append((parameter, wait()))
            except Exception as error:
                failed.append(error)
        with torch.no_grad():
            for parameter, start in starts.items():
                parameter.copy_(start)
            if failed:
                raise failed[0]
            for parameter, step in combined:
                parameter.add_(step)

    def _start(self, parameter: Parameter, step: torch.Tensor) -> Callable[[], torch.Tensor]:
        smaller, ctx = self.compression.compress(step.contiguous())
        handle = allreduce_async_(smaller, name=self.names[parameter], op=Adasum, process_set=self.process_set)
        return lambda: self.compression.decompress(handle.wait(), ctx)


class AdasumFront(HorovodFront):
    """Class that `DistributedOptimizer(op=Adasum)` puts in front of an optimizer's class."""

    # A gradient scaler then lets `step` unscale, and decide whether to step.
    _step_supports_amp_scaling = True

    _combine: Combination
    _alone: bool
    _noted_passes: int
    grad_scale: torch.Tensor | None
    found_inf: torch.Tensor | None

    @property
    def _parameter_names(self) -> dict[Parameter, str]:
        """Names by parameter, under the attribute at which programs for Horovod look."""
        return dict(self._combine.names)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Only note the number: gradients add up until `step`. Raises `ValueError` unless positive."""
        if passes <= 0:
            raise ValueError(f"backward_passes_per_step must be > 0, got {passes}")
        self._noted_passes = passes

    def _passes(self) -> int:
        return self._noted_passes

    def synchronize(self) -> None:
        """Do nothing: gradients are this rank's own, and may be clipped or read any time before `step`."""

    def skip_synchronize(self) -> NoReturn:
        """Raise `AssertionError`: without the combination the ranks' steps would differ."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step with this rank's gradients, and combine the step with those of the other ranks.

        Blocks until every rank has taken part. A `closure` gets this rank's parameters and gradients only. If a
        gradient scaler found infinities on any rank, no rank steps."""
        warn_of_second_group()
        if not self._unscaled():
            return None
        if self._alone:
            return super().step(closure)
        trained = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        starts = {parameter: parameter.detach().clone() for parameter in trained}
        loss = super().step(closure)
        self._combine(starts)
        return loss

    def rejoin(self) -> None:
        """Prepare for the other ranks that an elastic job has now."""
        self._alone = is_alone(self._combine.process_set)

    def _unscaled(self) -> bool:
        """Undo a gradient scaler's scale, if there is one; return whether all ranks' gradients are finite."""
        found: torch.Tensor | None = getattr(self, "found_inf", None)
        if found is None:
            return True
        scale: torch.Tensor | None = getattr(self, "grad_scale", None)
        # The optimizer below must not unscale again. The scaler deletes both.
        self.grad_scale = self.found_inf = None
        if not self._alone:
            found = allreduce(found, op=Max, name="adasum.found_inf", process_set=self._combine.process_set)
        if found.any():
            return False
        if scale is not None:
            with torch.no_grad():
                for group in self.param_groups:
                    for parameter in group["params"]:
                        if parameter.grad is not None:
                            parameter.grad.div_(scale)
        return True

    def add_param_group(self, param_group: dict[str, object]) -> None:
        """Add parameters, whose steps are combined like the others."""
        super().add_param_group(param_group)
        place = len(self.param_groups) - 1
        for index, parameter in enumerate(self.param_groups[-1]["params"]):
            self._combine.names[parameter] = f"allreduce.noname.{place}.{index}"
