"""Training program of `farandole demo`: two spirals are told apart, and rank 0 says how it goes in lines of JSON."""

import json
import math
import sys
import time

import torch

import farandole.torch as hvd

EVERY = 50  # steps between two lines
ROWS = 256  # of each rank in a step


def spirals(rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Make `rows` noisy points (rows, 2) of two spirals, and which of the two each belongs to (rows,)."""
    which = torch.randint(2, (rows,), generator=generator)
    turn = torch.rand(rows, generator=generator).sqrt() * 3 * math.pi
    angle = turn + math.pi * which
    points = torch.stack([turn * angle.cos(), turn * angle.sin()], dim=1) / 8
    return points + 0.02 * torch.randn(rows, 2, generator=generator), which


def train(steps: int) -> None:
    """Train for `steps` steps on all ranks; rank 0 prints."""
    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(torch.nn.Linear(2, 128), torch.nn.ReLU()),
        *(torch.nn.Linear(128, 128), torch.nn.ReLU()),
        torch.nn.Linear(128, 2),
    )
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.003), model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    generator = torch.Generator().manual_seed(1 + hvd.rank())  # each rank has rows of its own
    test, answers = spirals(2000, torch.Generator().manual_seed(0))
    since, waited = time.perf_counter(), hvd.metrics()["wait_seconds"]
    for step in range(1, steps + 1):
        points, which = spirals(ROWS, generator)
        loss = torch.nn.functional.cross_entropy(model(points), which)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % EVERY:
            continue
        mean = hvd.allreduce(loss.detach(), name="loss")
        now, waits = time.perf_counter(), hvd.metrics()["wait_seconds"]
        if hvd.rank() == 0:
            said = {
                "step": step,
                "loss": mean.item(),
                "right": (model(test).argmax(dim=1) == answers).float().mean().item(),
                "rate": EVERY * ROWS * hvd.size() / (now - since),
                "communication": (waits - waited) / (now - since),
            }
            print(json.dumps(said), flush=True)
        since, waited = now, waits


if __name__ == "__main__":
    train(int(sys.argv[1]))
