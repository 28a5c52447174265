"""Sampler of an elastic job: each sample of an epoch once, whatever the number of ranks."""

from collections.abc import Iterator, Sized

import torch

from farandole.core import default


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Sampler that shares out an epoch's samples over the ranks, and after a reset the ones that are left over.

    The order is the same on all ranks: shuffled by `seed` and the epoch, or as in `dataset`. Ranks take samples in
    turn. `record_batch` notes that all ranks have processed a batch; call it before `state.commit()`, and add the
    sampler to the state. A rank may get one sample twice, so that all have equally many: the last ones repeat the
    first. After the last batch of an epoch call `set_epoch`, not at the beginning of the next one, as that would
    forget which samples were processed when the ranks begin again."""

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch, self.processed_num = 0, 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch`, with all samples."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that every rank has processed one more batch of `batch_size` samples, or of the rest if that is less.

        `batch_idx` is Horovod's, and has no meaning here."""
        self.processed_num = min(len(self.dataset), self.processed_num + batch_size * self.num_replicas)

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and the number of samples that all ranks together have processed in it."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on where `state_dict` was."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Share out the samples that are not processed yet over the ranks that there are now."""
        self.num_replicas, self.rank = (default.size(), default.rank()) if default.is_initialized() else (1, 0)
        left = self._order()[self.processed_num :]
        self.num_samples = -(-len(left) // self.num_replicas)
        short = self.num_samples * self.num_replicas - len(left)
        self.remaining_indices = left
        padded = left + (left * -(-short // len(left)))[:short] if short else left
        self.indices = padded[self.rank :: self.num_replicas]

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(len(self.dataset)))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(len(self.dataset), generator=generator).tolist()

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
