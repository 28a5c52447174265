"""Requests that the engine keeps, so that it reads each only once."""

import sys

import numpy as np

import farandole.numpy as hvd
from farandole.core import default
from farandole.core.context import Context
from farandole.core.operations import kinds
from farandole.core.operations.request import Request
from helpers.ranks import run_ranks


def test_the_engine_keeps_one_request_for_each_name() -> None:
    def body(context: Context) -> None:
        engine, array, wire = default.membership().engine, np.ones(3), "allreduce.same"
        made = [Request(kinds.ALLREDUCE, "same", wire=wire) for _ in range(5)]
        for perform in (
            lambda each: engine.start(each, wire, array, array).wait(),
            lambda each: engine.run(each, wire, array, array),
        ):
            for place in range(5):
                perform(made[place])
            counts = [sys.getrefcount(each) for each in made]
            assert [count - counts[0] for count in counts] == [0, 0, 0, 0, 1]

    run_ranks(1, body)


def test_changes_of_a_tensor_under_one_name_are_seen() -> None:
    def body(context: Context) -> None:
        for step in range(3):
            for size, kind in ((3, np.float32), (3, np.float64), (70_000, np.float32), (3, np.float32)):
                array = np.full(size, 1.0 + context.rank + step, kind)
                handles = [hvd.allreduce_async_(array, name="changes", op=hvd.Sum)]
                assert hvd.synchronize(handles[0]) is array
                assert array[-1] == 3.0 + 2 * step

    run_ranks(2, body)
