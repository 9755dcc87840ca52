"""How an operation becomes one node of torch's graphs: a custom operator in the arithmetic it was written in."""

import functools
from collections.abc import Callable
from typing import Any

import torch


def operator(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Register a function of plain tensors as `dsattn::name`.

    Autocast around a call must not reach inside: it would turn the body's fp32 products into bf16 and change what is
    selected. Operands come in the dtype they have, results leave in the dtype that the operation promises.
    """

    def register(body: Callable[..., Any]) -> Any:
        @functools.wraps(body)
        def run(*operands: Any) -> Any:
            with torch.autocast(operands[0].device.type, enabled=False):
                return body(*operands)

        return torch.library.custom_op(f"dsattn::{name}", run, mutates_args=())

    return register
