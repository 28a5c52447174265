"""Wrong requests: what is refused at the call, what the ranks find out together, and that the job goes on."""

import re

import numpy as np
import pytest

from farandole.core.context import Context
from farandole.core.default import use
from farandole.core.operations import kinds
from farandole.errors import InvalidRequest, MismatchError, NotInitializedError
from farandole.meeting.rendezvous import SoloRendezvous
from farandole.numpy import Average, Max, Sum
from helpers.bindings import BINDINGS, FUNCTIONAL, SIZES, Binding
from helpers.ranks import run_ranks
from helpers.recurring import recurring

every_binding = pytest.mark.parametrize("binding", BINDINGS, ids=lambda binding: binding.name)
every_functional = pytest.mark.parametrize("binding", FUNCTIONAL, ids=lambda binding: binding.name)
every_size = pytest.mark.parametrize("size", SIZES)
several = pytest.mark.parametrize("size", SIZES[1:])


def goes_on(binding: Binding, size: int) -> None:
    result = binding.hvd.allreduce(binding.make(np.ones(3), "float32"), op=Sum, name="after")
    np.testing.assert_array_equal(binding.read(result), size)


@every_binding
@several
@pytest.mark.parametrize("what", ["dtype", "shape", "dimensions", "op", "scale", "root", "rows"])
def test_a_disagreement_names_the_ranks_and_what_differs(binding: Binding, size: int, what: str) -> None:
    hvd, odd = binding.hvd, size - 1

    def ask(rank: int) -> object:
        ours = rank == odd
        plain = binding.make(np.ones((4, 3)), "float32")
        if what == "dtype":
            return hvd.allreduce(binding.make(np.ones((4, 3)), "float64" if ours else "float32"), name="t")
        if what == "shape":
            return hvd.allreduce(binding.make(np.ones((4, 4 if ours else 3)), "float32"), name="t")
        if what == "dimensions":
            return hvd.broadcast(binding.make(np.ones((4, 3, 1) if ours else (4, 3)), "float32"), 0, name="t")
        if what == "op":
            return hvd.allreduce(plain, op=Max if ours else Average, name="t")
        if what == "scale":
            return hvd.allreduce(plain, prescale_factor=2.0 if ours else 1.0, name="t")
        if what == "root":
            return hvd.broadcast(plain, 1 if ours else 0, name="t")
        return hvd.allgather(binding.make(np.ones((4, 5 if ours else 3)), "float32"), name="t")

    def body(context: Context) -> str:
        for _ in range(2):
            with pytest.raises(MismatchError) as caught:
                ask(context.rank)
            assert caught.value.name.endswith(".t")
            assert set(caught.value.asked) == set(range(size))
            assert len({caught.value.asked[rank] for rank in range(odd)}) == 1
            assert caught.value.asked[odd] != caught.value.asked[0]
            goes_on(binding, size)
        return str(caught.value)

    texts = run_ranks(size, body)
    assert len(set(texts)) == 1
    assert re.search(rf"rank {odd}\b", texts[0])
    spelled = {"dtype": "dtype|type", "dimensions": "shape|dimension", "op": "op", "scale": "scale|factor"}
    assert re.search(spelled.get(what, "root" if what == "root" else "shape"), texts[0])


@every_functional
@several
def test_ranks_that_ask_for_different_operations(binding: Binding, size: int) -> None:
    def body(context: Context) -> None:
        kind = kinds.ALLGATHER if context.rank == 0 else kinds.ALLREDUCE
        tensor = binding.make(np.ones(3), "float32")
        handle = context.engine.start(recurring(kind), "same", tensor, tensor if kind == kinds.ALLREDUCE else None)
        with pytest.raises(MismatchError, match="allgather"):
            handle.wait()
        goes_on(binding, size)

    run_ranks(size, body)


@every_binding
@several
def test_one_wrong_tensor_does_not_harm_the_others(binding: Binding, size: int) -> None:
    def body(context: Context) -> None:
        handles = []
        for place in range(20):
            wrong = place == 7 and context.rank == 0
            tensor = binding.make(np.ones(4 if wrong else 3), "float32")
            handles.append(binding.hvd.allreduce_async(tensor, op=Sum, name=f"t{place}"))
        for place, handle in enumerate(handles):
            if place == 7:
                with pytest.raises(MismatchError, match="t7"):
                    handle.wait()
                with pytest.raises(MismatchError, match="t7"):
                    handle.wait()
                assert handle.done()
            else:
                np.testing.assert_array_equal(binding.read(handle.wait()), size)

    run_ranks(size, body)


@every_binding
@several
def test_a_group_with_a_wrong_member_fails(binding: Binding, size: int) -> None:
    def body(context: Context) -> None:
        shapes = (3, 4 if context.rank == 0 else 5, 6)
        with pytest.raises(MismatchError, match="2of3"):
            binding.hvd.grouped_allreduce([binding.make(np.ones(rows), "float32") for rows in shapes], name="g")
        goes_on(binding, size)

    run_ranks(size, body)


@every_binding
@several
def test_a_name_in_flight_cannot_be_used_again(binding: Binding, size: int) -> None:
    def body(context: Context) -> None:
        tensor = binding.make(np.ones(3), "float32")
        if context.rank == 0:
            first = binding.hvd.allreduce_async(tensor, name="twice", op=Sum)
            with pytest.raises(InvalidRequest, match="twice"):
                binding.hvd.allreduce_async(tensor, name="twice", op=Sum)
            binding.hvd.barrier()
        else:
            binding.hvd.barrier()
            first = binding.hvd.allreduce_async(tensor, name="twice", op=Sum)
        np.testing.assert_array_equal(binding.read(first.wait()), size)
        np.testing.assert_array_equal(binding.read(binding.hvd.allreduce(tensor, name="twice", op=Sum)), size)

    run_ranks(size, body)


@every_binding
@every_size
def test_wrong_arguments_are_refused_at_the_call(binding: Binding, size: int) -> None:
    def body(context: Context) -> None:
        hvd = binding.hvd
        rows = binding.make(np.ones((size * 2, 2)), "float32")
        scalar = binding.make(np.array(1), "float32")
        for refused in (
            lambda: hvd.broadcast(rows, size),
            lambda: hvd.broadcast_async_(rows, -1),
            lambda: hvd.alltoall(rows, [1] * (size + 1)),
            lambda: hvd.alltoall(rows, [size * 2 + 1] + [0] * (size - 1)),
            lambda: hvd.alltoall(rows, [-1] + [0] * (size - 1)),
            lambda: hvd.alltoall(rows, []),
            lambda: hvd.alltoall(rows, [0.5] * size),
            lambda: hvd.allgather(scalar),
            lambda: hvd.alltoall(scalar),
            lambda: hvd.reducescatter(scalar),
        ):
            with pytest.raises(InvalidRequest):
                refused()
        if size > 1:
            with pytest.raises(InvalidRequest, match="divide"):
                hvd.alltoall(binding.make(np.ones(size + 1), "float32"))
        for op in (6, -1, "sum"):
            with pytest.raises(ValueError, match="op"):
                hvd.allreduce(rows, op=op)
        with pytest.raises(TypeError):
            hvd.allreduce([1.0, 2.0])
        with pytest.raises(TypeError):
            hvd.allreduce_([1.0, 2.0])
        goes_on(binding, size)

    run_ranks(size, body)


@every_binding
def test_average_is_deprecated_and_excludes_op(binding: Binding) -> None:
    def body(context: Context) -> None:
        tensor = binding.make(np.full(3, context.rank), "float32")
        with pytest.warns(DeprecationWarning, match="average="):
            summed = binding.hvd.allreduce(tensor, average=False)
        np.testing.assert_array_equal(binding.read(summed), 1)
        with pytest.warns(DeprecationWarning, match="average="):
            mean = binding.hvd.allreduce(tensor, average=True)
        np.testing.assert_array_equal(binding.read(mean), 0.5)
        with pytest.raises(ValueError, match="supersedes average"):
            binding.hvd.allreduce(tensor, average=True, op=Sum)

    # Warnings are caught per process, so the ranks must not catch them at the same time.
    run_ranks(2, body, how="processes", framework="torch")


@every_functional
def test_before_init(binding: Binding) -> None:
    hvd = binding.hvd
    assert not hvd.is_initialized()
    assert str(hvd.global_process_set) == "ProcessSet(process_set_id=0, ranks=None, mpi_comm=None)"
    for function in (hvd.rank, hvd.size, hvd.local_rank, hvd.local_size, hvd.cross_rank, hvd.cross_size, hvd.barrier):
        with pytest.raises(NotInitializedError, match="init"):
            function()
    with pytest.raises(ValueError, match="integers"):
        hvd.ProcessSet(["0"])


@every_binding
def test_a_context_in_a_thread_comes_and_goes(binding: Binding) -> None:
    with Context(SoloRendezvous()) as context:
        with use(context):
            assert binding.hvd.is_initialized()
            assert (binding.hvd.rank(), binding.hvd.size(), binding.hvd.is_homogeneous()) == (0, 1, True)
        assert not binding.hvd.is_initialized()
