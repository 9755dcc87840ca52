"""How a peer runs the operation of a trial, on the same operands, keys in the same order, rows of the same lengths.

A peer is a function of a trial and a set of operands that returns what is timed; conversions that a caller would do
once (fp8 operands, scores masked for `torch.topk`) are done before. What is not installed raises ImportError, what
cannot serve raises something else: the runner lists either with its reason. Backwards are timed as the vendor has
them, also beside our deterministic one.
Letters: T query rows, S keys, K kept keys.
"""

import contextlib
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from dsattn.backends import Call, deep_gemm, flash_mla, tilelang
from dsattn.backends.cudnn import frontend
from dsattn.backends.cudnn import indexer_kl as cudnn_kl
from dsattn.backends.cudnn import select as cudnn_scores
from dsattn.backends.cudnn import select_topk as cudnn_topk
from dsattn.backends.cudnn import sparse_mla as cudnn_mla
from dsattn.bench.cases import Operands, Setting
from dsattn.bench.timing import Run
from dsattn.bench.trials import Trial, attend
from dsattn.errors import BackendUnavailable, InputError
from dsattn.ops import select_keys
from dsattn.selection import Selection

Peer = Callable[[Trial, Operands], Run]


def _selected(operands: Operands) -> Selection:
    if operands.selection is None:
        raise InputError("these operands have no selection")
    return operands.selection


def _flash_mla(trial: Trial, operands: Operands) -> Run:
    (q, kv), selection = operands.take("q", "k"), _selected(operands)
    rest = (selection.index, selection.length, None, trial.scale, trial.setting.shape.value_dim)
    return lambda: flash_mla.sparse_mla_forward(q, kv, *rest)


def _tilelang_forward(trial: Trial, operands: Operands) -> Run:
    (q, kv), index = operands.take("q", "k"), _selected(operands).index
    return lambda: tilelang.bare_forward(q, kv, index, trial.scale, trial.setting.shape.value_dim)


def _attended(trial: Trial, operands: Operands) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return attend("sparse_mla", trial.setting, operands)


def _cudnn_backward(trial: Trial, operands: Operands) -> Run:
    (grad_out, q, kv), selection = operands.take("grad_out", "q", "k"), _selected(operands)
    rest = (selection.index, selection.length, None, *_attended(trial, operands), trial.scale, False)
    return lambda: cudnn_mla.sparse_mla_backward(grad_out, q, kv, *rest)


def _tilelang_backward(trial: Trial, operands: Operands) -> Run:
    (grad_out, q, kv), index = operands.take("grad_out", "q", "k"), _selected(operands).index
    saved = (grad_out, *_attended(trial, operands))
    return lambda: tilelang.bare_backward(saved, q, kv, index, trial.scale)


def _torch_topk(trial: Trial, operands: Operands) -> Run:
    (scores,), keys, top_k = operands.take("scores"), trial.setting.ranges, trial.setting.shape.top_k
    scores = scores.masked_fill(~keys.mask(scores.shape[1]), -torch.inf)
    return lambda: scores.topk(min(top_k, scores.shape[1]), dim=1, sorted=False).indices


def _cudnn_topk(trial: Trial, operands: Operands) -> Run:
    (scores,), stop = operands.take("scores"), trial.setting.ranges.stop
    return lambda: cudnn_topk.bare_topk(scores, stop, trial.setting.shape.top_k)[0]


def _cudnn_keys(trial: Trial, operands: Operands) -> Run:
    q, k, w = operands.take("q_i", "k_i", "w")
    return lambda: _cudnn_selection(q, k, w, trial.setting, ascending=False)


def _cudnn_selection(q: Tensor, k: Tensor, w: Tensor, setting: Setting, *, ascending: bool) -> Tensor:
    """[T, K] int32: scores, then cuDNN's own top-k, in blocks of rows that 4 GiB of its scratch allow."""
    step, blocks = frontend.rows_per_launch(len(k), 2**32), []
    stop = setting.ranges.stop.contiguous()
    for row in range(0, len(q), step):
        part = slice(row, row + step)
        scores = cudnn_scores.indexer_scores(q[part], k, w[part], setting.keys - setting.rows + row)
        blocks.append(cudnn_topk.bare_topk(scores, stop[part], setting.shape.top_k, ascending=ascending)[0])
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def _tilelang_keys(trial: Trial, operands: Operands) -> Run:
    q, k, w = operands.take("q_i", "k_i", "w")
    keys = trial.setting.ranges
    return lambda: tilelang.topk_of_megatron(q, k, w, keys.start, keys.stop, trial.setting.shape.top_k)


def _deep_gemm_keys(trial: Trial, operands: Operands) -> Run:
    """fp8 scores; ranked by cuDNN where it is installed, else by torch."""
    return _deep_gemm_then("cudnn" if find_spec("cudnn") else "torch")(trial, operands)


def _deep_gemm_then(ranking: str) -> Peer:
    """Scores in the trial's precision, fp8 for one in bf16, ranked by `cudnn` or `torch`."""

    def prepare(trial: Trial, operands: Operands) -> Run:
        q, k, w = operands.take("q_i", "k_i", "w")
        setting, keys, top_k = trial.setting, trial.setting.ranges, trial.setting.shape.top_k
        precision = "fp8" if setting.precision == "bf16" else setting.precision
        call = Call.of(q, len(k), heads=q.shape[1], width=q.shape[2], top_k=top_k, precision=precision)
        if q.is_cuda and (lacks := deep_gemm.requirements(call)):
            raise BackendUnavailable(f"deep_gemm needs {', '.join(lacks)}")
        low = deep_gemm.quantized(q, k, w, precision)

        def run() -> Tensor:
            scores = deep_gemm.indexer_scores(low, keys.start, keys.stop)
            if ranking == "cudnn":
                return cudnn_topk.bare_topk(scores, keys.stop, top_k)[0]
            return scores.topk(min(top_k, scores.shape[1]), dim=1, sorted=False).indices

        return run

    return prepare


def _own_bf16(trial: Trial, operands: Operands) -> Run:
    """Our own selection without rounding: what a low precision must beat."""
    (q, k, w), setting = operands.take("q_i", "k_i", "w"), trial.setting
    return lambda: select_keys(q, k, w, setting.ranges, setting.shape.top_k, relu=setting.relu).index


Loss = tuple[Tensor, Tensor, Tensor]  # the sum over rows of the KL, the target and the softmax of the scores, [T, K]


def _cudnn_loss(indexer: Loss, attention: Loss, selection: Selection, scale: float) -> Loss:
    """indexer: q_i, k_i, w. attention: q, kv, lse. Every row has a key."""
    index, least = selection.index, 1e-30
    share = cudnn_kl.shares_of_scores(indexer, index, selection.length).masked_fill(index < 0, 0.0)
    target = cudnn_kl.shares_of_attention(attention, index, selection.length, scale)
    return (target * (target.clamp_min(least).log() - share.clamp_min(least).log())).sum(), target, share


def _cudnn_kl(direction: str) -> Peer:
    def prepare(trial: Trial, operands: Operands) -> Run:
        q_i, k_i, w, q, kv, lse = operands.take("q_i", "k_i", "w", "q", "k", "lse")
        selection, rows = _selected(operands), trial.setting.rows
        rest = ((q, kv, lse), selection, trial.scale)
        if direction == "forward":
            return lambda: _cudnn_loss((q_i, k_i, w), *rest)[0] / rows
        _, target, share = _cudnn_loss((q_i, k_i, w), *rest)
        one = torch.full((1,), 1 / rows, device=q_i.device)
        # The kernel overwrites the target: a copy a call, which costs what its read costs.
        return lambda: cudnn_kl.bare_backward((q_i, k_i, w), selection.index, target.clone(), share, one)

    return prepare


def _tilelang_kl(direction: str) -> Peer:
    def prepare(trial: Trial, operands: Operands) -> Run:
        q_i, k_i, w, q, kv = operands.take("q_i", "k_i", "w", "q", "k")
        keys, index, rows = trial.setting.ranges, _selected(operands).index, trial.setting.rows
        scores = tilelang.indexer_scores(q_i, k_i, w, keys.start, keys.stop)
        score = scores.gather(1, index.clamp(min=0).long()).masked_fill(index < 0, -torch.inf)
        if direction == "forward":
            return lambda: tilelang.indexer_kl_forward(q, kv, index, score, trial.scale)[0] / rows
        _, grad_score = tilelang.indexer_kl_forward(q, kv, index, score, trial.scale)
        grad_score = grad_score / rows
        return lambda: tilelang.indexer_kl_backward((q_i, k_i, w), index, grad_score)

    return prepare


@contextlib.contextmanager
def _fused_attention(device: torch.device) -> Iterator[None]:
    """torch's fused attention kernels, cuDNN's first; never the one that stores the matrix of a GPU's logits."""
    if device.type != "cuda":
        yield
        return
    fused = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    with sdpa_kernel(fused, set_priority=True):
        yield


def _causal(q: Tensor, k: Tensor, v: Tensor, device: torch.device) -> Tensor:
    """[1, H, T, V] of q, k, v [1, H or G, T, d]."""
    with _fused_attention(device):
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1])


def _torch_gqa(direction: str) -> Peer:
    def prepare(trial: Trial, operands: Operands) -> Run:
        setting = trial.setting
        if setting.rows != setting.keys:
            raise BackendUnavailable(f"torch's causal attention needs T = S, got {setting.rows} and {setting.keys}")
        q, k, v, grad = (x.transpose(0, 1)[None].contiguous() for x in operands.take("q", "k", "v", "grad_out"))
        if direction == "forward":
            return torch.no_grad()(lambda: _causal(q, k, v, setting.device)[0].transpose(0, 1))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = _causal(q, k, v, setting.device)

        def run() -> list[Tensor]:
            grads = torch.autograd.grad(out, leaves, grad, retain_graph=True)
            return [x[0].transpose(0, 1) for x in grads]

        return run

    return prepare


def _dense_layer(trial: Trial, operands: Operands) -> Run:
    """Dense attention with heads that are not absorbed, forward and backward: what a DSA layer replaces."""
    shape, rows, device = trial.setting.shape, trial.setting.rows, trial.setting.device
    normal = trial.setting.normal(7)
    q, k = (normal(1, shape.heads, rows, shape.dense_width).requires_grad_() for _ in range(2))
    v = normal(1, shape.heads, rows, shape.dense_value_dim).requires_grad_()
    grad = normal(1, shape.heads, rows, shape.dense_value_dim)
    return lambda: torch.autograd.grad(_causal(q, k, v, device), (q, k, v), grad)


def _vendor_layer(trial: Trial, operands: Operands) -> Run:
    """The best parts that vendors have on Hopper: cuDNN's selection, loss and backwards, FlashMLA's forward."""
    q, kv, q_i, k_i, w, grad_out = operands.take("q", "k", "q_i", "k_i", "w", "grad_out")
    setting, top_k, scale = trial.setting, trial.setting.shape.top_k, trial.scale
    length = setting.ranges.lengths().clamp(max=top_k)

    one = torch.full((1,), 1 / setting.rows, device=q.device)

    def run() -> tuple[Tensor, ...]:
        index = _cudnn_selection(q_i, k_i, w, setting, ascending=True)
        out, lse = flash_mla.sparse_mla_forward(q, kv, index, length, None, scale, setting.shape.value_dim)
        _, target, share = _cudnn_loss((q_i, k_i, w), (q, kv, lse), Selection(index, length), scale)
        dq, dkv = cudnn_mla.sparse_mla_backward(grad_out, q, kv, index, length, None, out, lse, scale, False)
        return dq, dkv, *cudnn_kl.bare_backward((q_i, k_i, w), index, target, share, one)

    return run


PEERS: dict[str, dict[str, Peer]] = {
    "sparse_mla.forward": {"flash_mla": _flash_mla, "tilelang": _tilelang_forward},
    "sparse_mla.backward": {"cudnn": _cudnn_backward, "tilelang": _tilelang_backward},
    "dense_gqa.forward": {"torch": _torch_gqa("forward")},
    "dense_gqa.backward": {"torch": _torch_gqa("backward")},
    "select_topk": {"torch": _torch_topk, "cudnn": _cudnn_topk},
    "select_keys": {"cudnn": _cudnn_keys, "tilelang": _tilelang_keys, "deep_gemm": _deep_gemm_keys},
    "indexer_kl.forward": {"cudnn": _cudnn_kl("forward"), "tilelang": _tilelang_kl("forward")},
    "indexer_kl.backward": {"cudnn": _cudnn_kl("backward"), "tilelang": _tilelang_kl("backward")},
    "dsa_layer": {"torch": _dense_layer, "cudnn": _vendor_layer},
}
"""Operation -> name -> peer. `dsa_layer` under `torch` is dense attention: another computation, to be replaced."""

LOW_PRECISION: dict[str, Peer] = {
    "bf16": _own_bf16,
    "deep_gemm": _deep_gemm_then("cudnn"),
    "deep_gemm_torch": _deep_gemm_then("torch"),
}
"""Name -> peer of `select_keys` in fp8 or mxfp8. DeepGEMM's operands come rounded; ours are rounded while timed."""


def peers_of(trial: Trial) -> dict[str, Peer]:
    """The peers of a trial's operation, without the one that serves it; none for the loss over every visible key."""
    if trial.op.startswith("indexer_kl") and trial.shape["K"] == 0:
        return {}
    found = PEERS.get(trial.op, {}) if trial.setting.precision == "bf16" else LOW_PRECISION
    return {name: peer for name, peer in found.items() if name != trial.choice.name}
