"""Attention to gathered keys: the plain-torch reference under sparse_mla and sparse_gqa.

Letters: T query rows, S keys, H heads, C key width, V value width, K kept keys, R rows of a block.
Values are either a tensor of their own, or the leading V channels of the keys (absorbed MLA).
"""

import torch
from torch import Tensor

from dsattn.ops import softmax
from dsattn.ops.blocks import add_rows_, row_blocks
from dsattn.ops.indexer import wide_dtype


def attend(
    q: Tensor, k: Tensor, v: Tensor | None, index: Tensor, sink: Tensor | None, scale: float, value_dim: int
) -> tuple[Tensor, Tensor]:
    """Gathers the selected keys of a block of rows, R at a time, in fp32 (fp64 for fp64 inputs).

    q: [T, H, C], k: [S, C], v: [S, V] or None (then k's leading `value_dim` channels), index: [T, K] with -1 in empty
    slots, sink: [T, H] or None. Returns out [T, H, V] in q's dtype and lse [T, H].
    """
    wide, index = wide_dtype(q, k), used_slots(index, k.shape[0])
    k_SC, v_SV = with_zero_row(k, wide), None if v is None else with_zero_row(v, wide)
    out = torch.empty(*q.shape[:2], value_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(*q.shape[:2], dtype=wide, device=q.device)
    for block in row_blocks(q.shape[0], _bytes_per_row(q, v, index, wide), q.device):
        rows_RK = gather_index(index[block], k.shape[0])
        k_RKC = gather(k_SC, rows_RK)
        v_RKV = k_RKC[..., :value_dim] if v_SV is None else gather(v_SV, rows_RK)
        logits_RHK = _logits(q[block].to(wide), k_RKC, index[block], scale)
        lse[block] = lse_RH = logits_RHK.logsumexp(-1)
        out_RHV = torch.bmm(softmax.probabilities(logits_RHK, lse_RH), v_RKV)
        if sink is not None:
            out_RHV *= softmax.keys_share(lse_RH, sink[block].to(wide)).unsqueeze(-1)
        out[block] = out_RHV
    return out, lse


def attend_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    index: Tensor,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(dq, dk, dv): probabilities come back from lse; dk and dv are summed in fp32 (fp64 for fp64 inputs).

    dv is None where the values are the keys' leading channels: dk then holds both.
    """
    wide, value_dim, index = lse.dtype, out.shape[-1], used_slots(index, k.shape[0])
    k_SC, v_SV = with_zero_row(k, wide), None if v is None else with_zero_row(v, wide)
    dk_SC = torch.zeros_like(k_SC)  # its last row collects the empty slots' zeros
    dv_SV = None if v_SV is None else torch.zeros_like(v_SV)
    denominator_TH = softmax.lse_with_sink(lse, sink)
    delta_TH = softmax.row_dot(out, grad_out, wide)
    dq = torch.empty_like(q)
    for block in row_blocks(q.shape[0], 2 * _bytes_per_row(q, v, index, wide), q.device):
        slots_RK = index[block]
        rows_RK = gather_index(slots_RK, k.shape[0])
        k_RKC = gather(k_SC, rows_RK)
        v_RKV = k_RKC[..., :value_dim] if v_SV is None else gather(v_SV, rows_RK)
        empty_R11 = (slots_RK < 0).all(1)[:, None, None]
        q_RHC = q[block].to(wide).masked_fill(empty_R11, 0)  # padding may hold NaN, and 0 * NaN must not be met
        grad_RHV = grad_out[block].to(wide).masked_fill(empty_R11, 0)
        p_RHK = softmax.probabilities(_logits(q_RHC, k_RKC, slots_RK, scale), denominator_TH[block])
        ds_RHK = torch.bmm(grad_RHV, v_RKV.transpose(1, 2))
        ds_RHK.sub_(delta_TH[block].unsqueeze(-1)).mul_(p_RHK).mul_(scale)
        dq[block] = torch.bmm(ds_RHK, k_RKC)
        dk_RKC = torch.bmm(ds_RHK.transpose(1, 2), q_RHC)
        if dv_SV is None:
            dk_RKC[..., :value_dim].baddbmm_(p_RHK.transpose(1, 2), grad_RHV)
        else:
            add_rows_(dv_SV, rows_RK, torch.bmm(p_RHK.transpose(1, 2), grad_RHV), deterministic)
        add_rows_(dk_SC, rows_RK, dk_RKC, deterministic)
    return dq, dk_SC[:-1].to(k.dtype), None if dv_SV is None or v is None else dv_SV[:-1].to(v.dtype)


def used_slots(index: Tensor, num_keys: int) -> Tensor:
    """index [T, K] without the slots past `num_keys`: a row's keys are distinct and stand first, so these are empty.

    Work then follows the keys there are, however large K is. On the CPU a key in such a slot raises IndexError.
    """
    if index.device.type == "cpu" and index[:, num_keys:].ge(0).any():
        raise IndexError(
            f"selection.index holds keys behind slot {num_keys}, but there are {num_keys} keys; "
            "a row's keys must be distinct and stand before its empty slots: Selection.from_index puts them so"
        )
    return index[:, :num_keys]


def gather_index(index: Tensor, num_keys: int) -> Tensor:
    """Key rows [R, K] as int64, empty slots pointing one row past the keys.

    On the CPU, entries past the keys raise IndexError here rather than read that row.
    """
    if index.device.type == "cpu" and index.numel() and int(index.max()) >= num_keys:
        raise IndexError(f"selection.index holds key row {int(index.max())}, but there are {num_keys} keys")
    return torch.where(index < 0, num_keys, index).long()


def gather(rows_SC: Tensor, index_RK: Tensor) -> Tensor:
    """[R, K, C]: the rows that `index_RK` names."""
    return rows_SC.index_select(0, index_RK.flatten()).view(*index_RK.shape, rows_SC.shape[1])


def with_zero_row(rows_SC: Tensor, wide: torch.dtype) -> Tensor:
    """[S + 1, C]: an empty slot gathers the zero row at the end, never a real one."""
    padded = rows_SC.new_empty(rows_SC.shape[0] + 1, rows_SC.shape[1], dtype=wide)
    padded[:-1] = rows_SC
    padded[-1] = 0
    return padded


def _bytes_per_row(q: Tensor, v: Tensor | None, index: Tensor, wide: torch.dtype) -> int:
    width = q.shape[2] + (0 if v is None else v.shape[1])
    return wide.itemsize * index.shape[1] * (width + 3 * q.shape[1])


def _logits(q_RHC: Tensor, k_RKC: Tensor, slots_RK: Tensor, scale: float) -> Tensor:
    """[R, H, K], -inf in empty slots."""
    logits_RHK = torch.bmm(q_RHC, k_RKC.transpose(1, 2)).mul_(scale)
    return logits_RHK.masked_fill_((slots_RK < 0).unsqueeze(1), -torch.inf)
