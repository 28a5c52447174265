"""Train on handwritten digits with torch's DistributedDataParallel, over farandole's or another backend's collectives.

    farandole run -np 2 python examples/torch_ddp.py
    torchrun --nproc-per-node 2 examples/torch_ddp.py --backend farandole

The program uses farandole only by the backend's name; torch finds the backend.
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

HELD_OUT = 297  # digits that are not trained on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="farandole")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="of one rank")
    options = parser.parse_args()

    dist.init_process_group(backend=options.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    digits = load_digits()
    rows = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    training, held_out = (TensorDataset(*rows[part]) for part in (slice(-HELD_OUT), slice(-HELD_OUT, None)))
    sampler = DistributedSampler(training)
    loader = DataLoader(training, batch_size=options.batch_size, sampler=sampler)

    network = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * size, momentum=0.9)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for images, targets in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images), targets)
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: loss of rank 0 {loss.item():.4f}", flush=True)

    with torch.no_grad():
        images, targets = held_out[rank::size]
        right = (network(images).argmax(1) == targets).sum()
    dist.all_reduce(right)
    if rank == 0:
        print(f"accuracy on {HELD_OUT} other digits with {size} ranks: {right.item() / HELD_OUT:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
