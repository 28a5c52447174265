"""Mixed precision: bfloat16, or float16 with a gradient scaler; gradients are unscaled before they are clipped.

    farandole run -np 2 python examples/torch_mixed_precision.py --dtype float16

The order matters: first reduce the gradients, then unscale and clip them, then make the step. An infinity on one rank
is then in the gradients of all ranks, so that all of them skip the same steps.
"""

import argparse

import torch
from sklearn.datasets import load_digits

import farandole.torch as hvd

HELD_OUT = 297  # digits that are not trained on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="of one rank")
    options = parser.parse_args()

    hvd.init()
    torch.manual_seed(hvd.rank())
    digits = load_digits()
    images, targets = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    held_out_images, held_out_targets = images[-HELD_OUT:], targets[-HELD_OUT:]
    images, targets = images[:-HELD_OUT], targets[:-HELD_OUT]

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    # bfloat16 has float32's range and needs no scale, so the scaler is disabled for it.
    scaler = torch.amp.GradScaler("cpu", enabled=options.dtype == "float16")
    autocast = torch.autocast("cpu", dtype=getattr(torch, options.dtype))
    together = options.batch_size * hvd.size()
    for epoch in range(options.epochs):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        for start in range(0, len(images) - together + 1, together):
            mine = order[start : start + together][hvd.rank() :: hvd.size()]
            optimizer.zero_grad()
            with autocast:
                loss = torch.nn.functional.cross_entropy(model(images[mine]), targets[mine])
            scaler.scale(loss).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
        mean = hvd.allreduce(loss.detach(), name="loss").item()
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {mean:.4f}, scale {scaler.get_scale():g}", flush=True)

    with torch.no_grad(), autocast:
        mine = slice(hvd.rank(), None, hvd.size())
        right = (model(held_out_images[mine]).argmax(1) == held_out_targets[mine]).sum()
    accuracy = hvd.allreduce(right, op=hvd.Sum, name="right").item() / HELD_OUT
    if hvd.rank() == 0:
        print(f"accuracy on {HELD_OUT} other digits: {accuracy:.3f}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
