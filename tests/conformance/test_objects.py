"""Collectives over Python objects."""

import threading

import numpy as np
import pytest

from farandole.core.context import Context
from farandole.errors import InvalidRequest
from helpers.bindings import BINDINGS, SIZES, Binding
from helpers.ranks import run_ranks

every_binding = pytest.mark.parametrize("binding", BINDINGS, ids=lambda binding: binding.name)
every_size = pytest.mark.parametrize("size", SIZES)


@every_binding
@every_size
def test_broadcast_object_from_every_root(binding: Binding, size: int) -> None:
    def body(context: Context) -> None:
        for root in range(size):
            mine = {"rank": context.rank, "text": "x" * 100_000, "pair": (1, [2.5])}
            # The others often pass None, whose type is not the root's.
            got = binding.hvd.broadcast_object(mine if context.rank == root else None, root)
            assert got == {**mine, "rank": root}
            assert binding.hvd.broadcast_object(root, root_rank=root, name="named") == root
        shout = binding.hvd.broadcast_object(lambda text: text.upper(), 0)
        assert shout("a") == "A"
        with pytest.raises(InvalidRequest, match="root"):
            binding.hvd.broadcast_object(1, root_rank=size)

    run_ranks(size, body)


@every_binding
@every_size
def test_allgather_object_in_rank_order(binding: Binding, size: int) -> None:
    def body(context: Context) -> None:
        mine = {"rank": context.rank, "more": np.arange(context.rank * 1000)}
        gathered = binding.hvd.allgather_object(mine)
        assert [each["rank"] for each in gathered] == list(range(size))
        assert [len(each["more"]) for each in gathered] == [rank * 1000 for rank in range(size)]
        assert binding.hvd.allgather_object(None, name="none") == [None] * size

    run_ranks(size, body)


@every_binding
def test_an_object_that_cannot_be_pickled_raises_on_all_ranks(binding: Binding) -> None:
    def body(context: Context) -> None:
        for gathers, bad in ((False, 0), (True, 1)):
            mine = {"lock": threading.Lock()} if context.rank == bad else 1
            with pytest.raises(TypeError if context.rank == bad else InvalidRequest, match="lock") as got:
                binding.hvd.allgather_object(mine) if gathers else binding.hvd.broadcast_object(mine, root_rank=bad)
            assert context.rank == bad or f"rank {bad} cannot pickle" in str(got.value)
        assert binding.hvd.allgather_object(context.rank) == [0, 1, 2]

    run_ranks(3, body)
