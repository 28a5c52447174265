"""Division of tasks' GPUs among ranks."""

from collections.abc import Sequence

from farandole.errors import ConfigError


def divide(addresses: Sequence[str], ranks: int) -> list[list[str]]:
    """Divide the GPUs of a task among its `ranks`; return those of each rank, which are consecutive.

    Raises `ConfigError` if they do not divide evenly."""
    each, left = divmod(len(addresses), ranks)
    if left:
        problem = f"is {ranks}, but tasks have {len(addresses)} GPUs, which so many ranks cannot share evenly"
        raise ConfigError("ranks_per_task", f"{problem}; change spark.task.resource.gpu.amount or the resource profile")
    return [[*addresses[each * rank : each * (rank + 1)]] for rank in range(ranks)]


def visible_gpus(by_local_rank: Sequence[object]) -> str:
    """Return a host's CUDA_VISIBLE_DEVICES, with the GPU of local rank i at index i, where user code expects it.

    Further GPUs of a rank follow. The text is empty if there are no GPUs. A GPU of several ranks appears only once."""
    lists = [[str(gpu) for gpu in gpus] for gpus in by_local_rank if isinstance(gpus, list)]
    ordered = [gpus[0] for gpus in lists if gpus] + [gpu for gpus in lists for gpu in gpus[1:]]
    return ",".join(dict.fromkeys(ordered))
