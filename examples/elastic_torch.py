"""Train on handwritten digits while ranks are killed, and come and go.

    farandole run -np 3 --min-np 1 --max-np 4 python examples/elastic_torch.py --steps 2000 --pause 0.02

Each rank prints its process: kill one by `kill -9`. The others go on with the last finished step, and a new rank takes
its place. A step trains on the same rows whatever the number of ranks is.
"""

import argparse
import os
import time

import torch
from sklearn.datasets import load_digits

import farandole.torch as hvd

HELD_OUT, BATCH = 297, 120  # digits that are not trained on, and those of one step of all ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step, for time to kill ranks")
    options = parser.parse_args()

    hvd.init()
    torch.manual_seed(0)
    digits = load_digits()
    images, targets = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        print(f"process {os.getpid()} is rank {hvd.rank()} of {hvd.size()}", flush=True)
        while state.step < options.steps:
            order = torch.randperm(len(images) - HELD_OUT, generator=torch.Generator().manual_seed(state.step))
            mine = order[:BATCH][hvd.rank() :: hvd.size()]
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images[mine]), targets[mine])
            mean = hvd.allreduce(loss.detach(), name="loss").item()
            loss.backward()
            optimizer.step()
            state.step += 1
            state.commit()
            if hvd.rank() == 0:
                print(f"step {state.step}: loss {mean:.4f}, {hvd.size()} ranks", flush=True)
            time.sleep(options.pause)

    # Nothing is copied at a commit after each step: a step that was not finished has changed nothing.
    train(hvd.elastic.TorchState(model, optimizer, copies=False, step=0))
    if hvd.rank() == 0:
        with torch.no_grad():
            accuracy = (model(images[-HELD_OUT:]).argmax(1) == targets[-HELD_OUT:]).float().mean().item()
        print(f"accuracy on {HELD_OUT} other digits: {accuracy:.3f}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
