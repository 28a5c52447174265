"""Bound allreduces: the results, errors and jobs of `allreduce_`, for every binding that has them."""

import gc
import threading
import weakref

import numpy as np
import pytest

import farandole.numpy
from farandole.core import default
from farandole.core.context import Context
from farandole.errors import EngineClosed, InvalidRequest, MismatchError, NotInitializedError
from farandole.meeting.rendezvous import SoloRendezvous
from helpers.bindings import BINDINGS, Binding
from helpers.ranks import run_ranks

BINDING = [binding for binding in BINDINGS if hasattr(binding.hvd, "bind")]

every_binding = pytest.mark.parametrize("binding", BINDING, ids=lambda binding: binding.name)


@every_binding
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_bound_allreduce_is_an_allreduce_in_place(binding: Binding, size: int) -> None:
    hvd = binding.hvd

    def body(context: Context) -> None:
        cases = [
            ((), {"op": hvd.Sum}),
            ((3, 5), {}),
            ((7,), {"op": hvd.Max}),
            ((2, 1000), {"prescale_factor": 0.5, "postscale_factor": 3.0}),
            ((70_001,), {"op": hvd.Sum}),
            ((0, 4), {"op": hvd.Sum}),
        ]
        for place, (shape, options) in enumerate(cases):
            for dtype in ("float32", "int64") if "prescale_factor" not in options else ("float32",):
                tensor = binding.make(np.zeros(shape), dtype)
                bound = hvd.bind(tensor, name=f"{place}.{dtype}", **options)
                for step in range(4):
                    values = binding.make(np.full(shape, 3.0 * context.rank + step), dtype)
                    tensor[...] = values
                    expected = binding.read(hvd.allreduce(values, name=f"as.{place}.{dtype}", **options))
                    assert bound() is tensor
                    np.testing.assert_array_equal(binding.read(tensor), expected)

    run_ranks(size, body)


@every_binding
def test_bound_tensors_without_a_name_are_matched_by_their_order(binding: Binding) -> None:
    def body(context: Context) -> None:
        tensors = [binding.make(np.full(3, 1.0 + place), "float32") for place in range(3)]
        bound = [binding.hvd.bind(tensor, op=binding.hvd.Sum) for tensor in tensors]
        for _ in range(2):
            for place in (2, 0, 1):
                bound[place]()
        assert [float(binding.read(tensor)[0]) for tensor in tensors] == [4.0, 8.0, 12.0]

    run_ranks(2, body)


@every_binding
def test_it_follows_the_values_and_keeps_the_tensor(binding: Binding) -> None:
    def body(context: Context) -> None:
        tensor = binding.make(np.ones(4), "float32")
        bound = binding.hvd.bind(tensor, name="kept", op=binding.hvd.Sum)
        del tensor
        gc.collect()
        for step in range(1, 5):
            assert binding.read(bound())[0] == 2.0**step

    run_ranks(2, body)


@every_binding
def test_wrong_tensors_are_refused_when_they_are_bound(binding: Binding) -> None:
    def body(context: Context) -> None:
        for wrong in ([1.0, 2.0], None, 3.0):
            with pytest.raises(TypeError, match="expected a"):
                binding.hvd.bind(wrong, name="wrong")
        with pytest.raises(InvalidRequest, match="contiguous"):
            binding.hvd.bind(binding.make(np.ones((4, 4)), "float32")[:, 1], name="strided")
        bound = binding.hvd.bind(binding.make(np.ones(2), "float32"), name="one")
        with pytest.raises(TypeError, match="no arguments"):
            bound(3)
        with pytest.raises(TypeError, match="no arguments"):
            bound(name="two")
        with pytest.raises(ValueError, match="op must be one of"):
            binding.hvd.bind(binding.make(np.ones(2), "float32"), op=99)

    run_ranks(1, body)


@every_binding
def test_ranks_that_differ_get_the_error_of_an_allreduce(binding: Binding) -> None:
    def body(context: Context) -> None:
        bound = binding.hvd.bind(binding.make(np.ones(2 + context.rank), "float32"), name="differs")
        for _ in range(3):
            with pytest.raises(MismatchError, match=r"allreduce\.differs"):
                bound()
        right = binding.make(np.ones(2), "float32")
        assert binding.read(binding.hvd.bind(right, name="right", op=binding.hvd.Sum)()).tolist() == [2.0, 2.0]

    run_ranks(2, body)


@every_binding
def test_it_belongs_to_the_job_that_runs(binding: Binding) -> None:
    tensor = binding.make(np.ones(3), "float32")

    def in_a_job(context: Context) -> None:
        for _ in range(3):
            assert binding.read(bound())[0] == 1.0
        context.shutdown()
        for _ in range(2):
            with pytest.raises(EngineClosed):
                bound()

    with default.use(Context(SoloRendezvous())) as first:
        bound = binding.hvd.bind(tensor, name="follows")
        in_a_job(first)
    for _ in range(2):
        with pytest.raises(NotInitializedError):
            bound()
    for _ in range(2):
        with default.use(Context(SoloRendezvous())) as context:
            in_a_job(context)


@every_binding
def test_a_shutdown_releases_the_engine_of_what_is_bound(binding: Binding) -> None:
    with default.use(Context(SoloRendezvous())) as context:
        engine = weakref.ref(context)
        bound = binding.hvd.bind(binding.make(np.ones(3), "float32"), name="released")
        bound()
        context.shutdown()
    del context
    gc.collect()
    assert engine() is None
    with pytest.raises(NotInitializedError):
        bound()


@every_binding
def test_threads_may_share_it(binding: Binding) -> None:
    def body(context: Context) -> None:
        tensor = binding.make(np.ones(1), "float32")
        bound = binding.hvd.bind(tensor, name="shared", op=binding.hvd.Max)
        refused: list[InvalidRequest] = []

        def call() -> None:
            with default.use(context):
                for _ in range(200):
                    try:
                        bound()
                    except InvalidRequest as error:  # the name is in flight in the other thread
                        refused.append(error)

        threads = [threading.Thread(target=call) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all("in flight" in str(error) for error in refused)
        assert binding.read(tensor).tolist() == [1.0]

    run_ranks(1, body)


def test_an_array_keeps_its_memory_while_it_is_bound() -> None:
    def body(context: Context) -> None:
        array = np.ones(4, np.float32)
        bound = farandole.numpy.bind(array, name="array", op=farandole.numpy.Sum)
        with pytest.raises(ValueError, match="cannot resize"):
            array.resize(1000)
        array.shape = (2, 2)
        assert bound().tolist() == [[1.0, 1.0], [1.0, 1.0]]
        read_only = np.ones(2)
        read_only.flags.writeable = False
        with pytest.raises(InvalidRequest, match="read-only"):
            farandole.numpy.bind(read_only, name="read-only")

    run_ranks(1, body)


def test_a_cycle_through_a_bound_array_is_collected() -> None:
    class Array(np.ndarray):
        bound: object

    def body(context: Context) -> None:
        array = np.ones(4).view(Array)
        array.bound = farandole.numpy.bind(array, name="cycle")
        gone = weakref.ref(array)
        del array
        gc.collect()
        assert gone() is None

    run_ranks(1, body)
