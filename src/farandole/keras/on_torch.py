"""Keras' torch backend: gradients are ready when an optimizer gets them, so all are reduced together."""

from collections.abc import Sequence

import keras
import torch

import farandole.torch as hvd
from farandole.core.operations import kinds
from farandole.core.operations.request import Request
from farandole.core.process_sets.process_set import ProcessSet
from farandole.keras.backend import Options, compress_each, reduction_arguments, value_of
from farandole.torch.ops import requests

__all__ = ["allreduce", "divide", "hvd", "is_tensor", "reduce_each"]


def is_tensor(value: object) -> bool:
    """Return whether `value` is a torch tensor or a Keras variable."""
    return isinstance(value, (torch.Tensor, keras.Variable))


def reduce_each(
    tensors: Sequence[torch.Tensor], groups: Sequence[Sequence[int]] | None, name: str, options: Options
) -> list[torch.Tensor]:
    """Reduce each group together; without groups all tensors are one. Blocks until every rank has made the request."""
    dense = [tensor.to_dense() if options.sparse_as_dense else tensor for tensor in tensors]
    sent, contexts = compress_each([tensor.detach().contiguous() for tensor in dense], options)
    groups = [range(len(sent))] if groups is None else groups
    # The operator for int8 is internal, so the functions of `hvd` do not take it.
    request = Request(kinds.ALLREDUCE, reduction=options.sent, process_set=options.process_set)
    handles = [
        requests.start(request.renamed(f"{name}.{number}", grouped=True), [sent[place] for place in group])
        for number, group in enumerate(groups)
    ]
    reduced = list(tensors)
    for group, handle in zip(groups, handles, strict=True):
        for place, output in zip(group, handle.wait(), strict=True):
            reduced[place] = options.compression.decompress(output, contexts[place])
    return reduced


def divide(gradient: torch.Tensor, process_set: ProcessSet) -> torch.Tensor:
    """See `Backend`."""
    return gradient / (process_set.size() or 1)


def allreduce(tensor: torch.Tensor | keras.Variable, name: str | None, options: Options) -> torch.Tensor:
    """See `farandole.torch.allreduce`."""
    return hvd.allreduce(value_of(tensor), name=name, **reduction_arguments(options))
