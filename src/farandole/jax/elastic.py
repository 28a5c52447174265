"""Elastic training with JAX.

state = hvd.elastic.JaxState(params=params, opt_state=opt_state, step=0)

@hvd.elastic.run
def train(state):
    while state.step < 1000:
        state.params, state.opt_state = train_step(state.params, state.opt_state, batch_of(state.step))
        state.step += 1
        state.commit()

Compiled functions go on with the ranks that there are, unless shapes depend on their number, as with
`allgather`."""

import copy
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from farandole.core import default
from farandole.core.operations.objects import broadcast_object
from farandole.elastic import HorovodInternalError, HostsUpdatedInterrupt, ObjectState, State, run
from farandole.jax.adapter import Array, numbers_of
from farandole.jax.ops import broadcast

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt", "JaxState", "ObjectState", "State", "run"]

Tree = TypeVar("Tree")


class JaxState(ObjectState):
    """State of pytrees and any other objects by name, which are attributes: `state.params`.

    `save` copies arrays on their devices, so that a step may take them by `donate_argnums`. Where rank 0 has pytrees of
    another structure, a new rank takes over the structure too. Blocks until arrays are computed.

    With `copies=False` the saved arrays are those of the program, which never change: steps must not donate them."""

    def __init__(self, *, copies: bool = True, **kwargs: object) -> None:
        self._copies = copies
        super().__init__(_broadcast_tree, default.rank, **kwargs)

    def save(self) -> None:
        """Keep a copy of everything in memory; raises the failure of a step that has made one of the arrays."""
        # Else loaders would be saved before the failure is raised.
        for leaf in jax.tree.leaves([getattr(self, name) for name in self._saved_state]):
            if isinstance(leaf, jax.Array):
                leaf.block_until_ready()
        super().save()

    def _copy(self, value: object) -> object:
        def copied(leaf: object) -> object:
            if isinstance(leaf, jax.Array):
                return jnp.copy(leaf) if self._copies else leaf
            return copy.deepcopy(leaf)

        return jax.tree.map(copied, value)


def _broadcast_tree(obj: Tree) -> Tree:
    """Return rank 0's pytree, with its arrays on the devices of this rank's where the structures are equal."""
    leaves, form = jax.tree.flatten(obj)
    held = [_Form.of(leaf) if isinstance(leaf, jax.Array) else leaf for leaf in leaves]
    forms, skeleton = jax.tree.flatten(broadcast_object(jax.tree.unflatten(form, held), 0, "elastic.tree"))
    same = skeleton == form  # type: ignore[operator]  # JAX declares no equality of structures
    before = leaves if same else [None] * len(forms)
    pairs = [(each, leaf) for each, leaf in zip(forms, before, strict=True) if isinstance(each, _Form)]
    received = iter(broadcast([each.like(leaf) for each, leaf in pairs], 0, "elastic.tree"))
    filled = [each.array(next(received)) if isinstance(each, _Form) else each for each in forms]
    taken: Tree = jax.tree.unflatten(skeleton, filled)
    return taken


@dataclass(frozen=True)
class _Form:
    """Shape and dtype of an array, as numbers if it holds random keys of the generator `impl`."""

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    impl: str

    @classmethod
    def of(cls, array: Array) -> "_Form":
        numbers = numbers_of(array)
        return cls(numbers.shape, numbers.dtype, "" if numbers is array else str(jax.random.key_impl(array)))

    def like(self, leaf: object) -> Array:
        """Return the array to overwrite: `leaf` if it has this form, else a new one."""
        if isinstance(leaf, jax.Array) and _Form.of(leaf) == self:
            return numbers_of(leaf)
        return jnp.zeros(self.shape, self.dtype)

    def array(self, numbers: Array) -> Array:
        return jax.random.wrap_key_data(numbers, impl=self.impl) if self.impl else numbers
