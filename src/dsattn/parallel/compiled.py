"""`torch.compile` for what layers call between kernels: their gated MLPs, those of shared experts too.

Layers themselves are not compiled: what a replay keeps is Python (`parallel/recompute.py`), collectives begin early and
are waited for late, attention and its loss are kernels already, and routed experts are grouped products.
"""

from torch import nn

from dsattn.model.mlp import SwiGLU

BACKEND = "inductor"


def compile_mlps(model: nn.Module) -> None:
    """In place, under the names that parameters have; traced at first use, for any number of rows.

    model: after tensor parallelism, whose weights are traced as they are split; before FSDP2, whose hooks stay outside.
    """
    for module in model.modules():
        if isinstance(module, SwiGLU):
            module.compile(backend=BACKEND, fullgraph=True, dynamic=True)
