"""Operations inside programs that XLA compiles: one custom call for each operation, with any number of arrays.

XLA starts independent calls in any order, which may differ between ranks. This is safe, because no call holds a thread
while it waits, and each has a name of its own in its program."""

import struct
import threading
from weakref import ReferenceType, ref

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.core import trace_ctx  # JAX has no public access to the program that is being traced

from farandole.core.operations import kinds
from farandole.core.operations.reduction import Adasum
from farandole.core.process_sets.process_set import membership_of
from farandole.errors import InvalidRequest
from farandole.jax.adapter import Array, unsupported
from farandole.jax.plugin import register
from farandole.jax.traced_request import TracedRequest


class _Program(threading.local):
    """The program that this thread traces, and the number of its operations without a name so far."""

    trace: ReferenceType[object] | None = None
    count: int = 0


_program = _Program()


def traced_name(name: str | None) -> str | None:
    """Return `name`, or a number within the program that is being traced if it is None; None outside of a program.

    Ranks that trace the same program get the same names, even if they trace it a different number of times."""
    program = None
    trace: object = trace_ctx.trace
    while trace is not None:
        if hasattr(trace, "frame"):  # this trace makes a program; others transform one
            program = trace
        trace = getattr(trace, "parent_trace", None)
    if name is not None or program is None:
        return name
    if _program.trace is None or _program.trace() is not program:
        _program.trace, _program.count = ref(program), 0
    _program.count += 1
    return f"traced.{_program.count - 1}"


def run(traced: TracedRequest, tensors: tuple[Array, ...]) -> tuple[Array, ...]:
    """Add the operation to the program. It runs with the program, even if its results are not used.

    Raises `InvalidRequest` for an unsupported dtype, and if the shape of a result is not known at this point."""
    request, (rank_id, process_set) = traced.request, traced.at
    wire = f"{request.stem}.{request.name}" if request.name is not None else f"{request.stem}.unnamed."
    for tensor in tensors:
        # XLA sees random keys as the integers that they are made of, with the layout of none before JAX 0.7.
        is_key = jnp.issubdtype(tensor.dtype, jax.dtypes.extended) and jax.__version_info__ >= (0, 7)
        if not is_key and (refusal := unsupported(tensor)):
            raise InvalidRequest(wire, refusal)
    membership = membership_of(request.process_set, wire)
    root = membership.place_of(request.root, wire) if request.kind in kinds.ROOTED else 0
    op, prescale, postscale = request.reduction
    # JAX may take integers of 64 bits for 32 bits, except in attributes that are NumPy arrays.
    numbers = [rank_id, process_set, request.kind, op, root, request.grouped, _bits(prescale), _bits(postscale)]
    shapes = [
        _shape(traced, wire, place, tensor.shape, membership.rank, membership.size)
        for place, tensor in enumerate(tensors)
    ]
    keeps_shapes = request.kind in kinds.KEEPING_SHAPE
    results = jax.ffi.ffi_call(
        register(),
        [_result(shape, tensor.dtype) for shape, tensor in zip(shapes, tensors, strict=True)],
        has_side_effect=True,
        # Operations on single elements can be applied to a batch as a whole.
        vmap_method="broadcast_all" if keeps_shapes and op != Adasum else "sequential",
        input_output_aliases={place: place for place in range(len(tensors))} if keeps_shapes else None,
    )(*tensors, name=wire, numbers=_int64(numbers))
    if request.kind != kinds.ALLTOALL:
        return tuple(results)
    return results[0], jnp.full(membership.size, tensors[0].shape[0] // membership.size, jnp.int32)


def _shape(
    traced: TracedRequest, wire: str, place: int, shape: tuple[int, ...], rank: int, size: int
) -> tuple[int, ...]:
    if traced.request.kind in kinds.KEEPING_SHAPE:
        return shape
    if not shape:
        raise InvalidRequest(wire, "the array needs a first dimension")
    if traced.request.kind == kinds.ALLGATHER:
        return (shape[0] * size if traced.rows is None else traced.rows[place], *shape[1:])
    if traced.request.kind == kinds.REDUCESCATTER:
        return (shape[0] // size + (rank < shape[0] % size), *shape[1:])
    if traced.request.splits is not None:
        raise InvalidRequest(wire, "inside jax.jit every rank gets an equal part; splits are for calls outside of it")
    return shape


def _result(shape: tuple[int, ...], dtype: object) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]


def _bits(value: float) -> int:
    (bits,) = struct.unpack("q", struct.pack("d", value))
    return int(bits)


def _int64(numbers: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(numbers, np.int64)
