"""torch's reductions as the engine's."""

import torch
from torch.distributed import ReduceOp

from farandole.core.operations.reduction import Average, Max, Min, Product, Reduction, Sum
from farandole.errors import InvalidRequest

__all__ = ["reduction_of"]


_REDUCTIONS = {
    ReduceOp.SUM: Reduction(Sum),
    ReduceOp.AVG: Reduction(Average),
    ReduceOp.MIN: Reduction(Min),
    ReduceOp.MAX: Reduction(Max),
    ReduceOp.PRODUCT: Reduction(Product),
}
# The reductions of complex numbers: only these may treat the real and the imaginary parts separately.
_OF_PARTS = {ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM}
# For bools, "and" is Min and "or" is Max.
_OF_BOOLS = {ReduceOp.BAND: Reduction(Min), ReduceOp.BOR: Reduction(Max)}


def reduction_of(asked: ReduceOp, dtype: torch.dtype, what: str) -> Reduction:
    """Return the engine's reduction for torch's `ReduceOp`; raises `InvalidRequest` for an unsupported one."""
    op: ReduceOp.RedOpType = asked.op  # type: ignore[attr-defined]  # torch's stub lacks it
    if dtype.is_complex and op not in _OF_PARTS:
        raise InvalidRequest(what, f"{op.name} of {dtype} is not supported; use SUM, AVG or PREMUL_SUM")
    found = _REDUCTIONS.get(op)
    if found is not None:
        return found
    if op == ReduceOp.PREMUL_SUM:
        # PyTorch 2.10 has no `factor`.
        return Reduction(Sum, float(asked.__getstate__()[1]))  # type: ignore[index]
    if dtype == torch.bool and op in _OF_BOOLS:
        return _OF_BOOLS[op]
    raise InvalidRequest(what, f"{op.name} of {dtype} is not supported; use SUM, AVG, MIN, MAX, PRODUCT or PREMUL_SUM")
