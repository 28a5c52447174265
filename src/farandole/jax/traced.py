"""Operations inside programs that XLA compiles: one custom call for each operation, with any number of arrays.

XLA starts independent calls in any order, which may differ between ranks. This is safe, because no call holds a thread
while it waits, and each has a name of its own in its program."""

import math
import struct
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.core import trace_ctx  # JAX has no public access to the program that is being traced
from jax._src.interpreters.mlir import register_attribute_handler  # or to how a call's attributes are written
from jax._src.mesh import get_abstract_mesh  # or, in the oldest versions, to the devices of a mapped function
from jax.extend.mlir import ir

from farandole.core.operations import kinds
from farandole.core.operations.reduction import Adasum
from farandole.core.process_sets.process_set import membership_of
from farandole.errors import InvalidRequest
from farandole.jax.adapter import Array, is_traced, unsupported
from farandole.jax.plugin import register
from farandole.jax.traced_request import TracedRequest


class _Name:
    """The name of a call, which becomes unique when JAX writes the program for XLA.

    Not when the call is traced: JAX keeps what it has traced of a jitted function and uses it in other programs, and
    ranks may have traced different numbers of programs. Names are compared by identity, so that JAX does not take two
    calls for one."""

    def __init__(self, text: str) -> None:
        self.text = text


# The names that are taken in each program, by the context of MLIR that it is written in.
_taken: WeakKeyDictionary[ir.Context, set[str]] = WeakKeyDictionary()


def _write(name: _Name) -> ir.Attribute:
    """Return the attribute for the name; a name that the program has already gets a number.

    Ranks that trace the same program get the same names, because JAX writes it in its order."""
    taken = _taken.setdefault(ir.Context.current, set())
    unique, number = name.text, 0
    while unique in taken:
        number += 1
        unique = f"{name.text}.{number}"
    taken.add(unique)
    return ir.StringAttr.get(unique)


register_attribute_handler(_Name, _write)


def joins_program(*tensors: Array | None) -> bool:
    """Return whether an operation on `tensors` is part of a program: they are traced, or a program is being traced.

    Within a program, arrays that it does not take as arguments have values."""
    return any(map(is_traced, tensors)) or _is_tracing_program()


def _is_tracing_program() -> bool:
    trace: object = trace_ctx.trace
    while trace is not None:
        if hasattr(trace, "frame"):  # this trace makes a program; others transform one
            return True
        trace = getattr(trace, "parent_trace", None)
    return False


def run(traced: TracedRequest, tensors: tuple[Array, ...]) -> tuple[Array, ...]:
    """Add the operation to the program. It runs with the program, even if its results are not used.

    Raises `InvalidRequest` for an unsupported dtype, within a function that is mapped over several devices of this
    rank, and if the shape of a result is not known at this point."""
    request, (rank_id, process_set) = traced.request, traced.at
    in_program = _is_tracing_program()
    # Outside of a program the engine counts operations without a name.
    wire = f"{request.stem}.{request.name or ('traced' if in_program else 'unnamed.')}"
    if (devices := _mapped_devices()) > 1 and jax.local_device_count() > 1:
        # Each of them would make the call, and one rank's first device could meet another rank's second one.
        raise InvalidRequest(
            wire, f"this cannot be called in a function mapped over {devices} devices (jax.pmap, jax.shard_map)"
        )
    for tensor in tensors:
        # XLA sees random keys as the integers that they are made of, with the layout of none before JAX 0.7. A sum or
        # an extreme of such integers is no key.
        is_key = jnp.issubdtype(tensor.dtype, jax.dtypes.extended) and jax.__version_info__ >= (0, 7)
        is_moved = request.kind not in (kinds.ALLREDUCE, kinds.REDUCESCATTER)
        if not (is_key and is_moved) and (refusal := unsupported(tensor)):
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
    )(*tensors, name=_Name(wire) if in_program else wire, numbers=_int64(numbers))
    if request.kind != kinds.ALLTOALL:
        return tuple(results)
    return results[0], jnp.full(membership.size, tensors[0].shape[0] // membership.size, jnp.int32)


def _mapped_devices() -> int:
    """Return the number of devices that the function being traced is mapped over, of all processes."""
    mesh = get_abstract_mesh()
    # Not all versions of JAX tell the axes.
    return math.prod(mesh.shape[axis] for axis in getattr(mesh, "manual_axes", ()))


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
