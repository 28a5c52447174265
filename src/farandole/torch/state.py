"""Equal starts on all ranks: broadcasts of parameters and optimizer state."""

import warnings
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from itertools import zip_longest
from typing import TypeAlias

import torch

from farandole.core import default
from farandole.core.operations.handle import Handle
from farandole.core.operations.objects import broadcast_object
from farandole.errors import InvalidRequest
from farandole.torch.adapter import DTYPES, is_expanded
from farandole.torch.ops import broadcast_async_
from farandole.torch.second_group import warn_of_second_group


def broadcast_parameters(
    params: Mapping[str, object] | list[torch.Tensor] | list[tuple[str, torch.Tensor]], root_rank: int
) -> None:
    """Overwrite tensors with those of rank `root_rank`: a state_dict, or a list of tensors or (name, tensor) pairs.

    Blocks until all of the root's tensors have arrived. Raises `ValueError` for other types, and `InvalidRequest` for
    sparse and expanded tensors. Values of a state_dict that are not tensors stay unchanged, with a warning."""
    if isinstance(params, Mapping):
        pairs = sorted(params.items())
    elif isinstance(params, list):
        pairs = [item if isinstance(item, tuple) else (str(place), item) for place, item in enumerate(params)]
    else:
        raise ValueError(f"invalid params of type: {type(params).__name__}; pass a state_dict or a list")
    others = [name for name, value in pairs if not isinstance(value, torch.Tensor)]
    if others and isinstance(params, list):
        raise ValueError(f"params must hold tensors; {', '.join(others)} are none")
    if others:
        warnings.warn(f"{', '.join(others)}: no tensors, not broadcast; use broadcast_object", stacklevel=2)
    tensors = [(name, value) for name, value in pairs if isinstance(value, torch.Tensor)]
    for name, tensor in tensors:
        is_dense = tensor.layout is torch.strided and not tensor.is_nested
        if not is_dense or (tensor.numel() and is_expanded(tensor)):
            what = "its elements share memory (expand)" if is_dense else "it is sparse or nested"
            raise InvalidRequest(f"parameter.{name}", f"{what}, so it cannot be overwritten; leave it out")
    _broadcast(tensors, root_rank, "parameter")


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Give the optimizer the state and the options of the one on rank `root_rank`; types are kept.

    Blocks until the root's state has arrived. The root's optimizer is unchanged. The others' state may be empty:
    `model`, which Horovod needs to make a first state, is ignored. Their tensors are filled where they have the same
    form. Raises `ValueError` for LBFGS, whose state is not one per parameter."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    tensors: list[torch.Tensor] = []
    skeleton = _take_tensors(optimizer.state_dict(), tensors)
    kinds = [_kind(tensor) for tensor in tensors]
    skeleton, kinds = broadcast_object((skeleton, kinds), root_rank, "optimizer_state")
    if default.rank() != root_rank:
        devices = _devices_by_type(optimizer)
        # Memory that was never written to costs more time than the broadcast. An object may be the state of several.
        held = list({id(tensor): tensor for tensor in tensors if tensor.is_contiguous()}.values())
        tensors = [
            mine if mine is not None and _kind(mine) == kind else _empty(kind, devices)
            for mine, kind in zip_longest(held[: len(kinds)], kinds)
        ]
    _broadcast([(str(place), tensor) for place, tensor in enumerate(tensors)], root_rank, "optimizer_state")
    if default.rank() != root_rank:
        state = _put_tensors(skeleton, tensors)
        assert isinstance(state, dict)
        optimizer.load_state_dict(state)


_Kind: TypeAlias = tuple[torch.Size, torch.dtype, str]


def _kind(tensor: torch.Tensor) -> _Kind:
    return tensor.shape, tensor.dtype, tensor.device.type


def _empty(kind: _Kind, devices: Mapping[str, torch.device]) -> torch.Tensor:
    shape, dtype, device = kind
    return torch.empty(shape, dtype=dtype, device=devices.get(device, device))


def _devices_by_type(optimizer: torch.optim.Optimizer) -> dict[str, torch.device]:
    """Return the device of the first parameter of each type: a rank's GPU need not be the current one."""
    devices: dict[str, torch.device] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            devices.setdefault(parameter.device.type, parameter.device)
    return devices


@dataclass(frozen=True)
class _Hole:
    """The place of a tensor that was taken out of a state."""

    place: int


def _take_tensors(value: object, tensors: list[torch.Tensor]) -> object:
    """Return a copy of `value` with a hole for each tensor; add the tensors to `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _Hole(len(tensors) - 1)
    return _map_items(value, lambda item: _take_tensors(item, tensors))


def _put_tensors(value: object, tensors: list[torch.Tensor]) -> object:
    """Return a copy of `value` with its holes filled."""
    if isinstance(value, _Hole):
        return tensors[value.place]
    return _map_items(value, lambda item: _put_tensors(item, tensors))


def _map_items(value: object, change: Callable[[object], object]) -> object:
    if isinstance(value, dict):
        changed = copy(value)
        changed.update((key, change(item)) for key, item in value.items())
        return changed
    if isinstance(value, list):
        return [change(item) for item in value]
    if isinstance(value, tuple):
        items = [change(item) for item in value]
        # A named tuple takes its items one by one.
        remake: Callable[..., object] = type(value)
        return remake(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def _broadcast(pairs: list[tuple[str, torch.Tensor]], root: int, prefix: str) -> None:
    """Broadcast all tensors at once; those that the engine cannot write in place go through a copy."""
    warn_of_second_group()
    underway: list[tuple[torch.Tensor, torch.Tensor, Handle[torch.Tensor]]] = []
    for name, tensor in pairs:
        plain = tensor.detach()
        whole = plain.resolve_conj().resolve_neg().contiguous()
        # The engine moves bytes: a dtype that it cannot reduce is sent as bytes.
        sent = whole if whole.dtype in DTYPES else whole.reshape(-1).view(torch.uint8)
        underway.append((plain, whole, broadcast_async_(sent, root, f"{prefix}.{name}")))
    failed: Exception | None = None
    for plain, whole, handle in underway:
        try:
            handle.wait()
        except Exception as error:
            failed = failed or error
            continue
        if whole.data_ptr() != plain.data_ptr():
            plain.copy_(whole)
    if failed is not None:
        raise failed
