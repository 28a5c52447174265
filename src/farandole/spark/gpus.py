"""Division of tasks' GPUs among ranks."""

from collections.abc import Sequence

from farandole.errors import ConfigError

__all__ = ["divide", "visible_gpus"]


def divide(addresses: Sequence[str], ranks: int) -> list[list[str]]:
    """Return the GPUs of each rank of a task, neighbours together.

    Raises `ConfigError` unless all ranks get as many."""
    each, left = divmod(len(addresses), ranks)
    if left:
        problem = f"is {ranks}, but tasks have {len(addresses)} GPUs, which so many ranks cannot share evenly"
        raise ConfigError("ranks_per_task", f"{problem}; change spark.task.resource.gpu.amount or the resource profile")
    return [[*addresses[each * rank : each * (rank + 1)]] for rank in range(ranks)]


def visible_gpus(by_local_rank: Sequence[object]) -> str:
    """Return the GPUs of a host's ranks such that local rank i finds its own at index i, as user code expects.

    Further GPUs of a rank come after those. The text is empty if there are none."""
    lists = [[str(gpu) for gpu in gpus] for gpus in by_local_rank if isinstance(gpus, list)]
    ordered = [gpus[0] for gpus in lists if gpus] + [gpu for gpus in lists for gpu in gpus[1:]]
    return ",".join(dict.fromkeys(ordered))
