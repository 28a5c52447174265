"""How fast are CUDA tensors through host memory, beside gloo? It has never run on a GPU.

    python bench/gpu.py [--full] [--rounds 5]

Two ranks on one GPU: an allreduce of a CUDA tensor of three sizes by farandole.torch, and by gloo on the same tensors,
in turns. A measurement ends when the GPU has the result. Prints one table, writes bench/results/*-gpu.json."""

import sys
from collections.abc import Callable, Mapping, Sequence

import peers
import torch
import torch.distributed as dist
from comparison import KIB, MIB, OURS, Line, compare, size_text, table
from peers import Contender, Seat, Times
from race import record

import farandole.torch as hvd
from farandole.config import Config
from farandole.core.default import use

RANKS = 2
GLOO = "gloo"
SIZES: Sequence[int] = (64 * KIB, 4 * MIB, 64 * MIB)
MUST: Mapping[str, float] = {GLOO: 5.0}  # of the largest


def contender(size: int, reduce: Callable[[torch.Tensor], object]) -> Contender:
    tensor = torch.empty(size // 4, device="cuda")

    def run() -> None:
        reduce(tensor)
        torch.cuda.synchronize()

    def refresh() -> None:
        tensor.fill_(1.5)
        torch.cuda.synchronize()

    return Contender(run, refresh, lambda: bool((tensor == 1.5 * RANKS).all()))


def measure(seat: Seat) -> dict[str, Times]:
    """The part of a rank."""
    rounds, repeats = int(str(seat.options["rounds"])), int(str(seat.options["repeats"]))
    few = max(5, repeats // 10)
    results: dict[str, Times] = {}
    with seat.gloo(), seat.context("gpu", Config()) as context, use(context):
        for size in SIZES:
            contenders = {
                OURS: contender(size, lambda tensor: hvd.allreduce_(tensor, op=hvd.Sum, name="x")),
                GLOO: contender(size, dist.all_reduce),
            }
            title = f"allreduce of {size_text(size)} on one GPU"
            results[title] = peers.take_turns(seat, contenders, rounds, repeats if size < MIB else few)
    return results


def main() -> None:
    given = peers.arguments(__doc__).parse_args()
    if not torch.cuda.is_available():
        sys.stdout.write("gpu is left out: it needs a GPU, and PyTorch's CUDA build (make setup TORCH=cuda).\n")
        return
    options = {"rounds": given.rounds, "repeats": 400 if given.full else 100}
    races = peers.races_of(peers.run_ranks(__file__, RANKS, peers.LAUNCHERS["plain"], options))
    largest = size_text(SIZES[-1])
    lines: list[Line] = [
        line for title, race in races.items() for line in compare(title, race, MUST if largest in title else {})
    ]
    sys.stdout.write(f"{table('CUDA tensors through host memory, 2 ranks', lines)}\n")
    sys.stdout.write(f"{record('gpu', races, ('farandole', 'torch'), lines)}\n")


if __name__ == "__main__":
    seat = peers.seat_of(sys.argv)
    if seat is None:
        main()
    else:
        seat.leave(measure(seat))
