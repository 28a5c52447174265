"""Communicators of JAX's processes as process sets; JAX itself is not asked for any."""

import pytest

from farandole.core.context import Context
from farandole.errors import InvalidRequest
from helpers.ranks import run_ranks

pytest.importorskip("jax")

from farandole.jax.collectives import Communicators


def test_processes_of_one_color_are_a_set_in_the_order_of_their_keys() -> None:
    def body(context: Context) -> list[tuple[int, list[int]]]:
        communicators, rank = Communicators(context), context.rank
        made = [communicators.split(0, (rank + 1) % 3), communicators.split(5 * (rank == 1), rank // 2)]
        return [(address, list(ranks)) for address, ranks in [*made, communicators.split(5 * (rank == 1), rank // 2)]]

    zero, one, two = run_ranks(3, body)
    pair, alone = zero[1][0], one[1][0]
    assert len({0, pair, alone}) == 3
    assert zero == two == [(0, [2, 0, 1]), (pair, [0, 2]), (pair, [0, 2])]
    assert one == [(0, [2, 0, 1]), (alone, [1]), (alone, [1])]


@pytest.mark.parametrize("keys", [(0, 0), (0, 2)])
def test_keys_that_are_no_order_fail_on_all_processes(keys: tuple[int, int]) -> None:
    def body(context: Context) -> str:
        with pytest.raises(InvalidRequest, match="different communicators at the same time") as caught:
            Communicators(context).split(7, keys[context.rank])
        return str(caught.value)

    assert len(set(run_ranks(2, body))) == 1
