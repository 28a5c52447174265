"""Sparse embeddings: of large tables, ranks exchange only the rows that a batch has used.

    farandole run -np 2 python examples/torch_sparse_embeddings.py
    farandole run -np 2 python examples/torch_sparse_embeddings.py --dense

The data are generated: clicks of users on items, which depend on their tastes.
"""

import argparse

import torch

import farandole.torch as hvd

USERS, ITEMS, TASTES = 3000, 1000, 4


class Clicks(torch.nn.Module):
    """Estimates how likely a user clicks on an item."""

    def __init__(self) -> None:
        super().__init__()
        self.users = torch.nn.Embedding(USERS, TASTES, sparse=True)
        self.items = torch.nn.Embedding(ITEMS, TASTES, sparse=True)
        for table in (self.users, self.items):
            torch.nn.init.normal_(table.weight, std=0.1)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        return (self.users(user) * self.items(item)).sum(1)


def make_clicks(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return users, items, and whether the user clicked on the item. A few items have many users."""
    tastes = torch.Generator().manual_seed(0)
    users = torch.randn(USERS, TASTES, generator=tastes)
    items = torch.randn(ITEMS, TASTES, generator=tastes)
    generator = torch.Generator().manual_seed(seed)
    user = torch.randint(USERS, (rows,), generator=generator)
    item = (ITEMS * torch.rand(rows, generator=generator) ** 2).long()
    return user, item, ((users[user] * items[item]).sum(1) > 0).float()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dense", action="store_true", help="send whole tables, to compare")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=512, help="of one rank")
    options = parser.parse_args()

    hvd.init()
    torch.sparse.check_sparse_tensor_invariants.disable()  # else Adagrad warns that this was not decided
    torch.manual_seed(10_000 + hvd.rank())  # not the seed of the tastes, which are to be learned
    user, item, clicked = make_clicks(options.steps * options.batch_size, seed=1 + hvd.rank())

    model = Clicks()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.3)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), sparse_as_dense=options.dense
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    touched = 0
    for step in range(options.steps):
        batch = slice(step * options.batch_size, (step + 1) * options.batch_size)
        optimizer.zero_grad()
        likely = model(user[batch], item[batch])
        loss = torch.nn.functional.binary_cross_entropy_with_logits(likely, clicked[batch])
        loss.backward()
        touched += user[batch].unique().numel() + item[batch].unique().numel()
        optimizer.step()
        if step % 50 == 49:
            mean = hvd.allreduce(loss.detach(), name="loss").item()
            if hvd.rank() == 0:
                print(f"step {step + 1}: loss {mean:.4f}", flush=True)

    user, item, clicked = make_clicks(2000, seed=1000 + hvd.rank())
    with torch.no_grad():
        right = ((model(user, item) > 0) == (clicked > 0)).float().mean()
    accuracy = hvd.allreduce(right, name="right").item()
    if hvd.rank() == 0:
        share = touched / options.steps / (USERS + ITEMS)
        print(f"a step touches {100 * share:.0f} % of the rows on each rank")
        print(f"accuracy on other clicks: {accuracy:.3f}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
