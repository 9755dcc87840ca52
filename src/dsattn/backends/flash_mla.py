"""FlashMLA: the sparse MLA forward of DeepSeek (wheel `sgl-flash-mla`). It has no backward.

Its quirks, kept here: 64 or 128 heads, keys in multiples of 128, latents of 512 + 64 or 512, bf16. Its log-sum-exp is
natural by default and +inf in rows without keys. Hopper's kernels are behind `use_legacy`.
Letters: T query rows, S keys, H heads, C latent width, V value width, K kept keys.
"""

import importlib.util

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsattn.backends import Call

_KEYS = 128  # two tiles of keys a step


def requirements(call: Call) -> list[str]:
    """What `call` lacks, in words; the package is looked for, not imported."""
    needs = {
        "the package flash_mla (sgl-flash-mla)": importlib.util.find_spec("flash_mla") is not None,
        "a Hopper or Blackwell data-centre GPU": call.device == "cuda" and call.capability in (90, 100, 103),
        "bfloat16": call.dtype == "bfloat16",
        "width 512 or 576 with 512 values": call.width in (512, 576) and call.value_width == 512,
        "at most 128 heads": call.heads <= 128,
    }
    return [need for need, met in needs.items() if not met]


def sparse_mla_forward(
    q: Tensor, kv: Tensor, index: Tensor, length: Tensor, sink: Tensor | None, scale: float, value_dim: int
) -> tuple[Tensor, Tensor]:
    """(out [T, H, V], lse [T, H]), argument for argument as the reference's forward.

    Heads are padded with zeros to 64 or 128, slots with -1 to a multiple of 128. Raises ImportError without the
    package.
    """
    from flash_mla import flash_mla_sparse_fwd

    heads, slots = q.shape[1], index.shape[1]
    wide = 64 if heads <= 64 else 128
    q = q.contiguous() if wide == heads else pad(q, (0, 0, 0, wide - heads))
    if slots % _KEYS:
        index = pad(index, (0, -slots % _KEYS), value=-1)
    if sink is not None:
        sink = pad(sink.float(), (0, wide - heads))
    legacy = torch.cuda.get_device_capability(q.device)[0] == 9
    out, _, lse = flash_mla_sparse_fwd(
        q,
        kv.contiguous()[:, None],
        index.contiguous()[:, None],
        scale,
        d_v=value_dim,
        attn_sink=sink,
        topk_length=length.contiguous(),
        use_legacy=legacy,
    )
    lse = lse[:, :heads].masked_fill(length[:, None] == 0, -torch.inf)
    return out[:, :heads], lse
