"""Uneven data: ranks that run out of batches join, and the others continue without waiting for them.

    farandole run -np 2 python examples/torch_join.py

Rank r has 1/(r + 1) as many rows as rank 0. No rank pads its data, and no row is left out.
"""

import argparse

import torch
from sklearn.datasets import load_digits

import farandole.torch as hvd

HELD_OUT = 297  # digits that are not trained on


def rows_of(rank: int, size: int, rows: int) -> slice:
    """Return the rows of a rank; higher ranks get fewer."""
    shares = torch.tensor([1 / (each + 1) for each in range(size)])
    ends = (rows * shares.cumsum(0) / shares.sum()).round().long().tolist()
    return slice(ends[rank - 1] if rank > 0 else 0, ends[rank])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="of one rank")
    options = parser.parse_args()

    hvd.init()
    torch.manual_seed(hvd.rank())
    digits = load_digits()
    images, targets = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    held_out_images, held_out_targets = images[-HELD_OUT:], targets[-HELD_OUT:]
    mine = rows_of(hvd.rank(), hvd.size(), len(images) - HELD_OUT)
    images, targets = images[mine], targets[mine]

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    for epoch in range(options.epochs):
        steps = 0
        for batch in torch.randperm(len(images)).split(options.batch_size):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images[batch]), targets[batch]).backward()
            optimizer.step()
            steps += 1
        # Returns on all ranks once all have joined. Then all ranks continue with the weights and the momentum of a rank
        # that has made all steps.
        last = hvd.join()
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        hvd.broadcast_optimizer_state(optimizer, root_rank=last)
        counts = hvd.allgather(torch.tensor([steps]), name="steps").tolist()
        if hvd.rank() == 0:
            print(f"epoch {epoch}: steps {counts}, rank {last} was the last", flush=True)

    with torch.no_grad():
        mine = slice(hvd.rank(), None, hvd.size())
        right = (model(held_out_images[mine]).argmax(1) == held_out_targets[mine]).sum()
    accuracy = hvd.allreduce(right, op=hvd.Sum, name="right").item() / HELD_OUT
    if hvd.rank() == 0:
        print(f"accuracy on {HELD_OUT} other digits: {accuracy:.3f}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
