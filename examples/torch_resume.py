"""Checkpoint and resume: rank 0 saves after each epoch, and a job that is started again continues from there.

    farandole run -np 2 python examples/torch_resume.py --folder run --kill-in-epoch 3
    farandole run -np 2 python examples/torch_resume.py --folder run

The two runs together give the weights of one uninterrupted run, bit for bit.
"""

import argparse
import os
import signal
from pathlib import Path

import torch
from sklearn.datasets import load_digits

import farandole.torch as hvd

HELD_OUT = 297  # digits that are not trained on


def save(path: Path, epoch: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Replace the checkpoint atomically, so that there is always a complete one."""
    new = path.with_suffix(".new")
    torch.save({"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, new)
    new.replace(path)


def resume(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Give all ranks the state of rank 0's checkpoint, or its initial state; return the first epoch to train."""
    epoch = 0
    if hvd.rank() == 0 and path.exists():
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        epoch = saved["epoch"] + 1
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return hvd.broadcast_object(epoch, root_rank=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("run"), help="where rank 0 keeps its checkpoint")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="of one rank")
    parser.add_argument("--kill-in-epoch", type=int, help="the last rank dies in the middle of it, to try that")
    options = parser.parse_args()

    hvd.init()
    torch.manual_seed(0)
    digits = load_digits()
    images, targets = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    options.folder.mkdir(parents=True, exist_ok=True)
    first = resume(options.folder / "checkpoint.pt", model, optimizer)

    rows, together = len(images) - HELD_OUT, options.batch_size * hvd.size()
    for epoch in range(first, options.epochs):
        # The order depends on the epoch alone, so that it is the same in a job that resumes.
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(epoch))
        for step, start in enumerate(range(0, rows - together + 1, together)):
            if epoch == options.kill_in_epoch and step == 5 and hvd.rank() == hvd.size() - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            mine = order[start : start + together][hvd.rank() :: hvd.size()]
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images[mine]), targets[mine]).backward()
            optimizer.step()
        if hvd.rank() == 0:
            save(options.folder / "checkpoint.pt", epoch, model, optimizer)
            print(f"epoch {epoch}: saved", flush=True)

    if hvd.rank() == 0:
        with torch.no_grad():
            accuracy = (model(images[rows:]).argmax(1) == targets[rows:]).float().mean().item()
        print(f"accuracy on {HELD_OUT} other digits: {accuracy:.3f}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
