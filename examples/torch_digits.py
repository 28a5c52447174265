"""Train a small network on handwritten digits, on all ranks, as programs for Horovod do.

    farandole run -np 3 python examples/torch_digits.py --loss-file losses.json

In each step the batches of all ranks together are the batch of one process. So the losses are the same on any number of
ranks, if the total batch size and the total learning rate are the same.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from sklearn.datasets import load_digits

import farandole.torch as hvd

HELD_OUT = 297  # digits that are not trained on


class Network(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            torch.nn.Conv2d(1, 16, 3, padding=1),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Conv2d(16, 32, 3, padding=1),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Flatten(),
            torch.nn.Linear(32 * 2 * 2, 10),
        )


def read_digits() -> tuple[torch.Tensor, torch.Tensor]:
    digits = load_digits()
    return torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)


def batches(rows: int, batch_size: int, epoch: int) -> Iterator[torch.Tensor]:
    """Yield this rank's row numbers for each step of an epoch; all ranks use one order and take their own parts."""
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(epoch))
    together = batch_size * hvd.size()
    for start in range(0, rows - together + 1, together):
        yield order[start + hvd.rank() * batch_size :][:batch_size]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="of one rank")
    parser.add_argument("--lr", type=float, default=0.02, help="for the batch of one rank; multiplied by their number")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--loss-file", type=Path, help="where rank 0 writes the loss of each step as JSON")
    options = parser.parse_args()

    hvd.init()
    torch.manual_seed(options.seed + hvd.rank())
    images, targets = read_digits()
    train_images, train_targets = images[:-HELD_OUT], targets[:-HELD_OUT]

    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    # All ranks begin with the weights of rank 0.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    losses: list[float] = []
    for epoch in range(options.epochs):
        for mine in batches(len(train_images), options.batch_size, epoch):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(train_images[mine]), train_targets[mine])
            loss.backward()
            optimizer.step()
            losses.append(hvd.allreduce(loss.detach(), name="loss").item())
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {losses[-1]:.4f}", flush=True)

    with torch.no_grad():
        # Each rank predicts its share of the held-out digits.
        mine = slice(len(train_images) + hvd.rank(), None, hvd.size())
        right = (model(images[mine]).argmax(1) == targets[mine]).sum()
    accuracy = hvd.allreduce(right, op=hvd.Sum, name="right").item() / HELD_OUT
    if hvd.rank() == 0:
        print(f"accuracy on {HELD_OUT} other digits: {accuracy:.3f}", flush=True)
        if options.loss_file is not None:
            options.loss_file.write_text(json.dumps({"losses": losses, "accuracy": accuracy}))
    hvd.shutdown()


if __name__ == "__main__":
    main()
