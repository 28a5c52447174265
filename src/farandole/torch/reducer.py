"""Reduction of a model's gradients during the backward pass."""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.utils.hooks import RemovableHandle

from farandole.core.operations import kinds
from farandole.core.operations.compression import ByInt8, Compressor
from farandole.core.operations.gradients import GradientOptions, Passes
from farandole.core.operations.request import Request
from farandole.core.process_sets.process_set import is_alone
from farandole.errors import InvalidRequest
from farandole.torch.feedback import ErrorFeedback
from farandole.torch.flight import Flight, InFlight, Origin, as_they_are, bare
from farandole.torch.low_rank import LowRank, PowerSGD
from farandole.torch.ops import Compression, allreduce, requests
from farandole.torch.sparse import start_sparse

Parameter = torch.Tensor
# Starts the reduction of tensors, for the gradients at these places, and returns the wait for it.
Start = Callable[[Sequence[int], list[torch.Tensor]], Callable[[], object]]

# Gradients below this total are requested together, in one call. A larger total would cost less per gradient, but
# gradients held back do not overlap with the backward pass.
HELD_BYTES = 1 << 20


class Reducer:
    """Starter of an allreduce for each gradient, or group of gradients, soon after it has accumulated.

    Small gradients are held back until there are enough of them, the backward pass ends, or a thread waits. Each rank
    chooses by itself which ones to request together, because each is reduced under its own name. Gradients are reduced
    in place. Reading a gradient before `finish` blocks until it is reduced. While `paused`, gradients add up and none
    is started. Parameters keep no reference to the reducer: its hooks are removed with it. With `attach` False, nothing
    is hooked. This rank must be in the process set of `options` unless nothing is ever due."""

    def __init__(
        self,
        names: dict[Parameter, str],
        groups: Sequence[Sequence[Parameter]],
        passes: int,
        options: GradientOptions[torch.Tensor],
        attach: bool = True,
    ) -> None:
        # Within this class a parameter is its place in these lists: the hash of a tensor is a call of Python.
        self._parameters: list[Parameter] = []
        self._names: list[str] = []
        self._origins: list[Origin] = []
        self._groups: list[list[int]] = []
        self._in_groups: list[int] = []  # those that are reduced with others
        self._options = options
        self._request = Request(kinds.ALLREDUCE, reduction=options.sent, process_set=options.process_set)
        # None unless the compression feeds errors back.
        self.feedback: ErrorFeedback | LowRank | None = None
        if isinstance(options.compression, ByInt8):
            self.feedback = ErrorFeedback()
        elif isinstance(options.compression, PowerSGD):
            self.feedback = LowRank(options.compression.rank, partial(self._reduce_named, wake=False))
        self._attach = attach
        self.paused = False
        self._flights: dict[int, Flight] = {}
        self._held: dict[int, torch.Tensor] = {}
        self._held_bytes = 0
        self._looked_at = False
        # autograd runs the hooks in one thread per device. Held for changes of the fields, never during a wait.
        self._changing = threading.RLock()
        self._sparse: set[int] = set()
        # Frozen parameters whose gradients are zeros for the sake of their group, until the end of the step.
        self._frozen: set[int] = set()
        self._hooks: dict[int, RemovableHandle] = {}
        # Not at exit: the hooks die with the process anyway.
        weakref.finalize(self, _remove_hooks, self._hooks).atexit = False
        self._include(names, groups)
        self._passes = Passes(self._groups, passes)
        self.watch()

    @property
    def names(self) -> dict[Parameter, str]:
        """Return the names by parameter, which are the same on all ranks."""
        return dict(zip(self._parameters, self._names, strict=True))

    @property
    def passes(self) -> int:
        """Return the number of backward passes whose gradients are added up."""
        return self._passes.per_step

    @property
    def started(self) -> bool:
        """Return whether a gradient has accumulated since the last `finish` or `reset`."""
        return self._passes.started

    @property
    def looked_at(self) -> bool:
        """Return whether a gradient was read, and so waited for, since the last `finish` or `reset`."""
        return self._looked_at

    def add(self, parameters: Sequence[Parameter], names: dict[Parameter, str]) -> None:
        """Add parameters, each reduced on its own."""
        self._include(names, [[parameter] for parameter in parameters])
        self.set_passes(self._passes.per_step)

    def _include(self, names: dict[Parameter, str], groups: Iterable[Iterable[Parameter]]) -> None:
        reducer, begin = weakref.ref(self), len(self._parameters)
        places = {parameter: begin + index for index, parameter in enumerate(names)}
        for parameter, place in places.items():
            self._origins.append(Origin(weakref.ref(parameter), partial(_looked, reducer, place)))
        self._parameters += names
        self._names += names.values()
        made = [[places[parameter] for parameter in group] for group in groups]
        self._groups += made
        self._in_groups += [place for group in made if len(group) > 1 for place in group]

    def set_passes(self, passes: int) -> None:
        """Reduce after this many backward passes, and reset the counts."""
        self.reset()
        self._passes = Passes(self._groups, passes)
        self.watch()

    def watch(self) -> None:
        """Hook the parameters that require a gradient and are not hooked yet."""
        if not self._attach or len(self._hooks) == len(self._parameters):
            return
        reducer = weakref.ref(self)
        for place, parameter in enumerate(self._parameters):
            if place not in self._hooks and parameter.requires_grad:
                hook = partial(_accumulated, reducer, place)
                self._hooks[place] = parameter.register_post_accumulate_grad_hook(hook)

    def accumulated(self, place: int) -> bool:
        """Count one backward pass of the parameter at `place` among the names, and start what is due.

        Returns whether this is the first gradient held back since others were started: then `release` must be called
        at the end of the backward pass."""
        if self.paused:
            return False
        with self._changing:
            flight = self._flights.get(place)
            if flight is not None and flight.was_replaced(self._parameters[place]):
                self.reset()  # a gradient scaler skipped the last step, and other code cleared the gradients
            if self._in_groups and not self._passes.started:
                self._passes.leave_out(each for each in self._in_groups if not self._parameters[each].requires_grad)
            group = self._passes.add(place)
            if group:
                self._start(group)
                if self._held_bytes >= HELD_BYTES:
                    # A thread is about to wait for the last ones, and would have to wait for the engine's thread first.
                    self._release(wake=not self._passes.all_due)
            if group or self._passes.complete(place):
                for member in group or (place,):
                    InFlight.cover(self._parameters[member], self._origins[member])
            return len(group) == len(self._held) == 1

    def release(self) -> None:
        """Start what is held back: another rank may wait for it although this one does not read gradients."""
        with self._changing:
            self._release(wake=not self._passes.all_due)

    def look(self, place: int) -> None:
        """Wait until the gradient at `place` is reduced, unless it waits for others to be reduced with."""
        with self._changing:
            self._looked_at = True
            self._release(wake=place not in self._held)
            flight = self._flights.get(place)
        if flight is not None:
            flight.wait()

    def finish(self) -> None:
        """Reduce all gradients; those missing on this rank count as zeros.

        Blocks until every rank has taken part. Raises the first failure once no gradient is written to any more, and
        `InvalidRequest` if gradients were read before one was reduced that only other ranks had."""
        failed: list[Exception] = []
        late = [] if self._passes.all_due else self._passes.rest(self._wanted())
        looked_at, frozen = self._looked_at, self._frozen
        try:
            for group in late:
                _collect(partial(self._start, group), failed)
            _collect(partial(self._release, wake=False), failed)
            for flight in dict.fromkeys(self._flights.values()):
                _collect(flight.wait, failed)
        finally:
            self.reset()
        if failed:
            raise failed[0]
        for parameter in map(self._parameters.__getitem__, frozen):
            # An optimizer would decay the parameter, and move it by its momentum. All ranks have the same gradient.
            if parameter.grad is not None and not parameter.grad.any():
                parameter.grad = None
        if looked_at:
            self._refuse_late(late)
        self.watch()

    def _wanted(self) -> Iterator[int]:
        """Yield the places of the parameters that have a gradient, or may have one on another rank."""
        for place, parameter in enumerate(self._parameters):
            if parameter.requires_grad or parameter.grad is not None:
                yield place

    def _refuse_late(self, groups: Iterable[Sequence[int]]) -> None:
        for place in (place for group in groups for place in group):
            gradient = self._parameters[place].grad
            if gradient is not None and (gradient.coalesce().values() if gradient.is_sparse else gradient).any():
                raise InvalidRequest(
                    self._names[place],
                    "has no gradient from this rank's backward pass, but one from other ranks, and gradients were read "
                    "(clipped, unscaled, ...) before it was reduced, so the ranks would differ. Call "
                    "optimizer.synchronize() after backward, and step in optimizer.skip_synchronize()",
                )

    def reduce_loss(self, loss: Any) -> Any:
        """Return the loss of the reduced gradients, as a number or as a tensor of one."""
        mine = loss.detach() if isinstance(loss, torch.Tensor) else torch.tensor(loss, dtype=torch.float64)
        joined = allreduce(
            mine, name="optimizer.loss", op=self._options.reduction.op, process_set=self._options.process_set
        )
        return joined if isinstance(loss, torch.Tensor) else joined.item()

    def reset(self) -> None:
        """Reset the counts and drop started reductions."""
        with self._changing:
            self._release(wake=True)  # the other ranks may have done so already
            self._passes.reset()
            for parameter in self._parameters:
                InFlight.uncover(parameter)
            self._flights.clear()
            self._frozen = set()
            self._looked_at = False

    def rejoin(self) -> bool:
        """Drop reductions, those held back too, of a job that has ended; return whether this rank is alone in the next.

        The hooks follow: a rank that is alone has none."""
        self._held, self._held_bytes = {}, 0
        self.reset()
        if self.feedback is not None:
            self.feedback.clear()
        alone = is_alone(self._options.process_set)
        self._attach = not alone
        if alone:
            _remove_hooks(self._hooks)
            self._hooks.clear()
        self.watch()
        return alone

    def _start(self, group: Sequence[int]) -> None:
        gradients = [self._gradient(place) for place in group]
        first, place = gradients[0], group[0]
        if first.is_sparse:
            summed = start_sparse(
                first,
                self._names[place],
                self._options.reduction.op,
                self._options.process_set,
                wake=not self._passes.all_due,
            )
            parameter = self._parameters[place]
            self._flights[place] = Flight([parameter], partial(_complete_sparse, parameter, summed))
        elif len(group) == 1:
            self._held[place] = first
            self._held_bytes += first.nbytes
        else:
            self._fly(group, gradients, self._reduce_group)

    def _release(self, wake: bool) -> None:
        """Start reducing the gradients held back; without `wake` the caller waits at once."""
        if self._held:
            held, self._held, self._held_bytes = self._held, {}, 0
            self._fly(list(held), list(held.values()), partial(self._reduce_each, wake=wake))

    # A compiler leaves this to Python where it compiles a whole step, with its backward pass.
    @_disable_dynamo
    def _fly(self, places: Sequence[int], gradients: list[torch.Tensor], start: Start) -> None:
        with as_they_are():
            in_place = self._options.compression is Compression.none and all(map(torch.Tensor.is_contiguous, gradients))
            if in_place:
                complete = start(places, gradients)
            else:
                gradients = list(map(torch.Tensor.detach, gradients))  # which share their memory, and never wait
        if not in_place:
            complete = self._start_copies(places, gradients, start)
        flight = Flight([self._parameters[place] for place in places], complete)
        self._flights.update(dict.fromkeys(places, flight))

    def _start_copies(self, places: Sequence[int], gradients: list[torch.Tensor], start: Start) -> Callable[[], object]:
        """Start reducing what is sent of gradients that are compressed, or not contiguous, as channels-last ones."""
        compression, names = self._options.compression, [self._names[place] for place in places]
        if isinstance(self.feedback, LowRank):
            return self.feedback.begin(names, gradients, partial(start, places))
        packed = [compression.compress(gradient.contiguous()) for gradient in gradients]
        tensors, contexts = [tensor for tensor, _ in packed], [ctx for _, ctx in packed]
        if self.feedback is not None:
            for name, tensor in zip(names, tensors, strict=True):
                self.feedback.feed(name, tensor)
        return partial(_complete, names, gradients, tensors, contexts, compression, start(places, tensors))

    def _reduce_each(self, places: Sequence[int], tensors: list[torch.Tensor], wake: bool) -> Callable[[], object]:
        return self._reduce_named([self._names[place] for place in places], tensors, wake)

    def _reduce_named(self, names: Sequence[str], tensors: Sequence[torch.Tensor], wake: bool) -> Callable[[], object]:
        return requests.start_each(self._request, names, tensors, wake).wait

    def _reduce_group(self, places: Sequence[int], tensors: list[torch.Tensor]) -> Callable[[], object]:
        request = self._request.renamed(self._names[places[0]], grouped=True)
        return requests.start(request, tensors, write=True).wait

    def _gradient(self, place: int) -> torch.Tensor:
        """Return the tensor to reduce: the gradient, made dense if requested, or zeros if this rank has none."""
        parameter = self._parameters[place]
        gradient = parameter.grad
        if gradient is None:
            if not parameter.requires_grad:
                self._frozen.add(place)
            # Other ranks may have one. If it was sparse before, theirs is sparse again.
            gradient = torch.zeros_like(parameter, requires_grad=False)
            parameter.grad = gradient = gradient.to_sparse(1) if place in self._sparse else gradient
            return gradient
        gradient = bare(gradient)
        if gradient.requires_grad:
            raise InvalidRequest(
                self._names[place],
                "the gradient requires a gradient itself (backward(create_graph=True)) and cannot be reduced in place",
            )
        elif gradient.is_sparse and self._options.sparse_as_dense:
            parameter.grad = gradient = gradient.to_dense()
        elif gradient.is_sparse:
            self._refuse_sparse_in_group(place)
            self._sparse.add(place)
        return gradient

    def _refuse_sparse_in_group(self, place: int) -> None:
        if any(len(group) > 1 and place in group for group in self._groups):
            raise InvalidRequest(
                self._names[place],
                "a sparse gradient cannot be reduced in a group; pass sparse_as_dense=True or leave it out of groups",
            )


def _accumulated(reducer: "weakref.ref[Reducer]", place: int, parameter: Parameter) -> None:
    alive = reducer()
    # Compiled autograd takes no callback here; there, gradients are held back until a thread waits.
    if alive is not None and alive.accumulated(place) and not torch.compiler.is_compiling():
        torch.autograd.Variable._execution_engine.queue_callback(alive.release)


def _looked(reducer: "weakref.ref[Reducer]", place: int) -> None:
    alive = reducer()
    if alive is not None:
        alive.look(place)


def _collect(act: Callable[[], None], failed: list[Exception]) -> None:
    try:
        act()
    except Exception as error:
        failed.append(error)


def _remove_hooks(hooks: dict[int, RemovableHandle]) -> None:
    for hook in hooks.values():
        hook.remove()


def _complete(
    names: Sequence[str],
    gradients: Sequence[torch.Tensor],
    reduced: Sequence[torch.Tensor],
    contexts: Sequence[object],
    compression: Compressor[torch.Tensor],
    wait: Callable[[], object],
) -> None:
    try:
        wait()
    finally:
        # One of many independent reductions may have failed; its tensor is unchanged.
        for name, gradient, tensor, ctx in zip(names, gradients, reduced, contexts, strict=True):
            result = compression.decompress(tensor, ctx)
            if result.numel() != gradient.numel():  # a smaller one would be spread over the gradient
                shapes = f"{list(result.shape)} in place of {list(gradient.shape)}"
                raise InvalidRequest(name, f"decompress of compression= returned {shapes}; return the gradient's shape")
            if result is not gradient:
                gradient.copy_(result)


def _complete_sparse(parameter: Parameter, wait: Callable[[], torch.Tensor]) -> None:
    InFlight.replace(parameter, wait())
