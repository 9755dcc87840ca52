"""A guard against host syncs, for adapters that run on a CPU here: what would wait for a GPU is an error."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

WAITS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.is_nonzero.default,
}


class NoSync(TorchDispatchMode):
    """Raises where values of a tensor are asked for, or a shape that depends on them."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        masks = [x for x in args[1] if x is not None] if function is torch.ops.aten.index.Tensor else []
        if function in WAITS or any(mask.dtype == torch.bool for mask in masks):
            raise AssertionError(f"{function} waits for the GPU")
        return function(*args, **(kwargs or {}))


@pytest.fixture
def no_sync():
    """A context in which a host sync is an error."""
    return NoSync
