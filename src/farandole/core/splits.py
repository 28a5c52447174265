"""How rows are divided between ranks: pure arithmetic."""

from collections.abc import Sequence

from farandole.errors import InvalidRequest

__all__ = ["check_splits", "even_splits", "scatter_rows"]


def even_splits(rows: int, size: int, name: str) -> list[int]:
    """Return `size` equal parts of `rows`; raises `InvalidRequest` when they do not come out even."""
    if rows % size:
        raise InvalidRequest(name, f"{rows} rows cannot be split evenly over {size} ranks; pass splits=")
    return [rows // size] * size


def check_splits(splits: Sequence[int], rows: int, size: int, name: str) -> None:
    """Raise `InvalidRequest` unless `splits` gives each rank a part of at most `rows` rows in all."""
    if len(splits) != size:
        raise InvalidRequest(name, f"splits must have one entry per rank: expected {size}, got {len(splits)}")
    if any(part < 0 for part in splits):
        raise InvalidRequest(name, f"splits must not be negative, got {list(splits)}")
    if sum(splits) > rows:
        raise InvalidRequest(name, f"splits ask for {sum(splits)} rows, but the tensor has {rows}")


def scatter_rows(rows: int, size: int) -> list[int]:
    """Return how many of `rows` each rank gets from a reducescatter: the first ranks get what is left over."""
    share, extra = divmod(rows, size)
    return [share + (rank < extra) for rank in range(size)]
