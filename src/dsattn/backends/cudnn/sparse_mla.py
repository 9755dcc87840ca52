"""cuDNN's sparse MLA backward, for Hopper and Blackwell. On Hopper there is no forward.

Quirks, kept here: heads in multiples of 64, slots in multiples of 64 with -1 in empty ones, latents of 512 + 64 or 512,
bf16. Gradients repeat bit for bit on Blackwell alone. Before 1.29 a row without keys may hang the kernel, so older
frontends are refused; since then such rows get zeros, whatever they hold. Any scale will do.
Letters: T query rows, S keys, H heads, C latent width, V value width, K kept keys.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsattn.backends import Call, unmet
from dsattn.backends.cudnn import frontend
from dsattn.errors import BackendUnavailable
from dsattn.selection import Inverse

SAFE_EMPTY_ROWS = (1, 29)
_HEADS = 64


def requirements(call: Call) -> list[str]:
    """What `call` lacks, in words; the package is not imported."""
    needs = frontend.needs_of(call, SAFE_EMPTY_ROWS) | {
        "width 512 or 576 with 512 values": call.width in (512, 576) and call.value_width == 512,
        "gradients that need not repeat, on Hopper": not (call.deterministic and call.capability == 90),
    }
    return unmet(needs)


def sparse_mla_backward(
    grad_out: Tensor,
    q: Tensor,
    kv: Tensor,
    index: Tensor,
    length: Tensor,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    deterministic: bool,
    inverse: Inverse | None = None,
) -> tuple[Tensor, Tensor]:
    """(dq, dkv), argument for argument as the reference's backward.

    Heads are padded with zeros, slots with -1. Raises ImportError without the package, BackendUnavailable where a
    deterministic backward is asked of Hopper, or of a frontend that has none.
    """
    if deterministic and torch.cuda.get_device_capability(q.device)[0] == 9:
        raise BackendUnavailable("sparse_mla.backward: cudnn does not repeat bit for bit on Hopper")
    if 0 in (*q.shape[:2], len(kv), index.shape[1]):
        return torch.zeros_like(q), torch.zeros_like(kv)
    heads = q.shape[1]
    sink = torch.full((heads,), -torch.inf, device=q.device) if sink is None else sink.float()
    if more := -heads % _HEADS:
        q, out, grad_out = (pad(x, (0, 0, 0, more)) for x in (q, out, grad_out))
        lse, sink = pad(lse, (0, more)), pad(sink, (0, more), value=-torch.inf)
    run = frontend.entry("sparse_attention_backward")
    if deterministic and not frontend.takes(run, "deterministic"):
        raise BackendUnavailable("sparse_mla.backward: this cudnn frontend cannot repeat bits; use backend='triton'")
    grads = run(
        q.contiguous(),
        kv.contiguous(),
        out.to(q.dtype).contiguous(),
        grad_out.to(q.dtype).contiguous(),
        lse.float().contiguous(),
        sink.contiguous(),
        frontend.padded_slots(index, 64, -1),
        softmax_scale=scale,
        topk_length=length.contiguous(),
        **frontend.supported(run, deterministic=deterministic),
    )
    return grads["dq"][:, :heads].contiguous(), grads["dkv"]
