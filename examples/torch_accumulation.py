"""Gradient accumulation: a large batch in several passes, and one exchange of gradients for all of them.

    farandole run -np 2 python examples/torch_accumulation.py --passes 4

Each rank adds up the gradients of its passes. They are reduced once, after the last pass.
"""

import argparse

import torch
from sklearn.datasets import load_digits

import farandole.torch as hvd

HELD_OUT = 297  # digits that are not trained on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", type=int, default=4, help="backward passes for one step")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=8, help="of one pass of one rank")
    options = parser.parse_args()

    hvd.init()
    torch.manual_seed(hvd.rank())
    digits = load_digits()
    images, targets = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    held_out_images, held_out_targets = images[-HELD_OUT:], targets[-HELD_OUT:]
    images, targets = images[:-HELD_OUT], targets[:-HELD_OUT]

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=options.passes
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    together = options.batch_size * options.passes * hvd.size()
    for epoch in range(options.epochs):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        for start in range(0, len(images) - together + 1, together):
            mine = order[start : start + together][hvd.rank() :: hvd.size()]
            optimizer.zero_grad()
            for part in mine.split(options.batch_size):
                loss = torch.nn.functional.cross_entropy(model(images[part]), targets[part])
                # The passes' gradients are added up; this makes their sum the mean over the whole batch.
                (loss / options.passes).backward()
            optimizer.step()
        mean = hvd.allreduce(loss.detach(), name="loss").item()
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {mean:.4f}", flush=True)

    with torch.no_grad():
        mine = slice(hvd.rank(), None, hvd.size())
        right = (model(held_out_images[mine]).argmax(1) == held_out_targets[mine]).sum()
    accuracy = hvd.allreduce(right, op=hvd.Sum, name="right").item() / HELD_OUT
    if hvd.rank() == 0:
        print(f"accuracy on {HELD_OUT} other digits: {accuracy:.3f}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
