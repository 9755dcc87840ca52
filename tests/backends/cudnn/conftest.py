"""Stand-ins for every generation of the cuDNN frontend, made from its documents: the package needs a GPU.

1.25.0, 1.26.0, 1.29.1, 1.31.0 and 1.32.0 are as published; 1.33.0 is one to come, whose scores take `clean_logits`,
and whose attention backward takes no `deterministic`, as in builds that were seen.

They check every argument as a generation's own checks do, compute by the formula, and leave NaN, infinities or huge
numbers where the kernels write nothing.
"""

import gc
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

from dsattn.backends import vendors
from dsattn.backends.cudnn import frontend


class Namespace:
    """`cudnn.DSA`: a function is imported when it is first asked for. seen: the names, in that order."""

    def __init__(self, functions):
        self.functions, self.seen = functions, []

    def __getattr__(self, name):
        self.seen.append(name.removesuffix("_wrapper"))
        if name not in self.functions:
            raise AttributeError(f"module 'cudnn.DSA' has no attribute {name!r}")
        if isinstance(self.functions[name], Exception):
            raise self.functions[name]
        return self.functions[name]


class Frontend:
    """One generation. calls: what its functions were asked for, by name. namespace: `cudnn.DSA`."""

    def __init__(self, generation, major=9):
        self.version, self.major = tuple(map(int, generation.split(".")))[:2], major
        self.calls, self.unwritten = [], torch.nan
        names = ("indexer_forward", "indexer_top_k", "indexer_backward", "sparse_attention_backward")
        for name in (*names, "sparse_attn_score_recompute", "sparse_indexer_score_recompute"):
            setattr(self, f"{name}_wrapper", getattr(self, f"_{name}")())
        self.namespace = Namespace({name: value for name, value in vars(self).items() if "wrapper" in name})

    def _seen(self, name, **options):
        self.calls.append((name, options))

    def _indexer_forward(self):
        def run(q, k, w, ratio, sm_scale, offset, clean=True):
            (batch, rows, heads, width), keys = q.shape, k.shape[1]
            assert (ratio, sm_scale, batch, width, k.shape[2]) == (1, 1.0, 1, 128, 1)
            assert heads in (16, 32, 64)
            assert q.dtype == k.dtype == torch.bfloat16
            assert w.dtype == torch.bfloat16 or (w.dtype == torch.float32 and self.version >= (1, 31))
            assert rows <= keys, "more rows than keys"
            first = keys - rows if self.version < (1, 26) else 0 if offset is None else offset
            self._seen("indexer_forward", rows=rows, keys=keys, clean=clean)
            dot = torch.einsum("rhd,sd->rhs", q[0].float(), k[0, :, 0].float()).relu()
            found = torch.einsum("rhs,rh->rs", dot, w[0].float())
            behind = torch.arange(keys) > first + torch.arange(rows)[:, None]
            return {"scores": found.masked_fill(behind, -torch.inf if clean else self.unwritten)[None]}

        if self.version < (1, 26):
            return lambda q, k, w, ratio=4, sm_scale=1.0: run(q, k, w, ratio, sm_scale, None)

        def offsets(q, k, w, ratio=4, sm_scale=1.0, q_causal_offsets=None):
            assert q_causal_offsets.shape == (1,)
            assert q_causal_offsets.dtype == torch.int32
            return run(q, k, w, ratio, sm_scale, q_causal_offsets)

        def clean(q, k, w, ratio=4, sm_scale=1.0, q_causal_offsets=None, clean_logits=True):
            return run(q, k, w, ratio, sm_scale, q_causal_offsets, clean_logits)

        return clean if self.version >= (1, 33) else offsets

    def _indexer_top_k(self):
        """+0 before -0; NaN as the largest; nothing is written for a row of length 0."""

        def run(input_values, seq_lens, top_k, next_n, return_val, tie_break, deterministic):
            rows, keys = input_values.shape
            assert 0 < top_k <= 2048
            assert seq_lens.shape == (rows,)
            assert seq_lens.dtype == torch.int32
            assert input_values.is_contiguous()
            assert (next_n, tie_break) == (1, 1)
            self._seen("indexer_top_k", rows=rows)
            column = torch.arange(keys)
            zero = torch.where(torch.signbit(input_values) & (input_values == 0), -1e-45, input_values.float())
            order = torch.where(zero.isnan(), torch.inf, zero).masked_fill(column >= seq_lens[:, None], -torch.inf)
            best = order.sort(dim=1, descending=True, stable=True).indices[:, :top_k].int()
            best = torch.nn.functional.pad(best, (0, top_k - best.shape[1]), value=-1)
            best = best.masked_fill(torch.arange(top_k) >= seq_lens[:, None], -1)
            if deterministic:
                best = torch.where(best < 0, keys, best).sort(dim=1).values
                best = torch.where(best == keys, -1, best)
            else:
                best = best.roll(1, 1)  # in no order
            values = input_values.gather(1, best.clamp(min=0).long()).masked_fill(best < 0, -torch.inf)
            unwritten = seq_lens[:, None] == 0
            best, values = best.masked_fill(unwritten, 7), values.masked_fill(unwritten, torch.inf)
            return {"indices": best, "values": values if return_val else None}

        if self.version < (1, 31):
            return lambda input_values, seq_lens, top_k, next_n=1, return_val=True: None

        def ties(input_values, seq_lens, top_k, next_n=1, return_val=True, tie_break=0):
            return run(input_values, seq_lens, top_k, next_n, return_val, tie_break, False)

        def ordered(input_values, seq_lens, top_k, next_n=1, return_val=True, tie_break=0, deterministic=False):
            return run(input_values, seq_lens, top_k, next_n, return_val, tie_break, deterministic)

        return ordered if self.version >= (1, 32) else ties

    def _sparse_attention_backward(self):
        def run(q, kv, out, dout, lse, sink, index, scale, length):
            rows, heads, width = q.shape
            assert width in (512, 576)
            assert heads % 64 == 0
            assert q.dtype == kv.dtype == out.dtype == dout.dtype == torch.bfloat16
            assert lse.dtype == sink.dtype == torch.float32
            assert index.dtype == length.dtype == torch.int32
            assert index.shape[1] % 64 == 0
            assert out.shape == dout.shape == (rows, heads, 512)
            assert lse.shape == (rows, heads)
            assert sink.shape == (heads,)
            assert length.shape == (rows,)
            assert all(x.is_contiguous() for x in (q, kv, out, dout, lse, sink, index, length))
            self._seen("sparse_attention_backward", heads=heads, slots=index.shape[1])
            inside = (index >= 0) & (index < len(kv)) & (torch.arange(index.shape[1]) < length[:, None])
            q_, dout_, out_ = (x.float().masked_fill(length[:, None, None] == 0, 0) for x in (q, dout, out))
            key = kv[index.clamp(min=0).long()].float().masked_fill(~inside[..., None], 0)
            whole = torch.logaddexp(lse, sink.expand_as(lse))[..., None]
            p = (torch.einsum("thc,tnc->thn", q_, key) * scale - whole).exp().masked_fill(~inside[:, None], 0)
            dp = torch.einsum("thv,tnv->thn", dout_, key[..., :512])
            ds = p * (dp - (out_ * dout_).sum(-1, keepdim=True)) * scale
            dkey = torch.einsum("thn,thc->tnc", ds, q_)
            dkey[..., :512] += torch.einsum("thn,thv->tnv", p, dout_)
            dkv = torch.zeros(len(kv) + 1, width).index_add_(
                0, torch.where(inside, index, len(kv)).flatten().long(), dkey.flatten(0, 1)
            )
            dq = torch.einsum("thn,tnc->thc", ds, key)
            return {"dq": dq.to(q.dtype), "dkv": dkv[:-1].to(kv.dtype), "d_sink": torch.full_like(sink, torch.nan)}

        def old(q, kv, out, dout, lse, attn_sink, topk_idxs, softmax_scale=None, topk_length=None):
            raise AssertionError("rows without keys may hang this generation")

        def new(q, kv, out, dout, lse, attn_sink, topk_idxs, softmax_scale=None, topk_length=None, deterministic=False):
            assert not (deterministic and self.major == 9)
            return run(q, kv, out, dout, lse, attn_sink, topk_idxs, softmax_scale, topk_length)

        def plain(q, kv, out, dout, lse, attn_sink, topk_idxs, softmax_scale=None, topk_length=None):
            return run(q, kv, out, dout, lse, attn_sink, topk_idxs, softmax_scale, topk_length)

        if self.version >= (1, 33):
            return plain
        return new if self.version >= (1, 29) else old

    def _recompute(self, index, length, found):
        """What the kernels leave in slots that hold no key."""
        inside = (index >= 0) & (torch.arange(index.shape[1]) < length[:, None])
        return torch.where(inside, found, self.unwritten)

    def _sparse_attn_score_recompute(self):
        def run(
            q_attn, k_attn, lse, topk_indices, softmax_scale, qhead_per_kv_head, topk_length, topk_indices_global=False
        ):
            q, k, lse, index, length = (x[0] for x in (q_attn, k_attn, lse, topk_indices, topk_length))
            assert q.shape[1] == qhead_per_kv_head
            assert q.shape[1] % 64 == 0
            assert lse.dtype == torch.float32
            assert index.shape[1] % 128 == 0
            self._seen("sparse_attn_score_recompute", ids=topk_indices_global)
            inside = index >= 0
            key = k[index.clamp(min=0).long()].float().masked_fill(~inside[..., None], 0)
            logits = torch.einsum("thc,tnc->thn", q.float(), key) * softmax_scale
            found = (logits - lse[..., None]).exp().sum(1).masked_fill(~inside, 0)
            if self.major == 9:
                found = found / found.sum(1, keepdim=True)
            return {"target": self._recompute(index, length, found)[None]}

        return run

    def _sparse_indexer_score_recompute(self):
        def run(q_indexer, k_indexer, weights, topk_indices, qhead_per_kv_head, topk_length, topk_indices_global=False):
            q, k, w, index, length = (x[0] for x in (q_indexer, k_indexer, weights, topk_indices, topk_length))
            assert q.shape[1] == qhead_per_kv_head > 1
            assert q.dtype == k.dtype == w.dtype == torch.bfloat16
            assert index.shape[1] % 128 == 0
            self._seen("sparse_indexer_score_recompute", ids=topk_indices_global)
            share = selected_scores(q.float(), k, w.float(), index).softmax(1)
            return {"predict": self._recompute(index, length, share)[None]}

        return run

    def _indexer_backward(self):
        def run(q, w, k, attn, predict, index, grad_loss, sm_scale, loss_coeff, deterministic=False):
            assert (sm_scale, loss_coeff) == (1.0, q.shape[1])
            assert q.shape[2] >= 64
            assert index.shape[2] % 128 == 0
            assert grad_loss.shape == (1,)
            assert grad_loss.dtype == attn.dtype == predict.dtype == torch.float32
            assert all(x.is_contiguous() for x in (q, w, k, attn, predict, index))
            assert not (deterministic and self.major == 9)
            self._seen("indexer_backward", heads=q.shape[2], deterministic=deterministic)
            floor, dtypes = 3.7e-44, (q.dtype, w.dtype, k.dtype)
            g = -attn[0].clamp(min=0) * (predict[0] >= floor)
            signal = (g - predict[0] * g.sum(1, keepdim=True)) * grad_loss * loss_coeff / q.shape[1]
            attn.fill_(self.unwritten)
            leaves = [x[0].float().requires_grad_() for x in (q, w, k)]
            with torch.enable_grad():
                found = selected_scores(leaves[0], leaves[2], leaves[1], index[0]).masked_fill(index[0] < 0, 0)
                grads = torch.autograd.grad(found, leaves, signal)
            grads = (x.to(dtype)[None] for x, dtype in zip(grads, dtypes, strict=True))
            return dict(zip(("d_index_q", "d_weights", "d_index_k"), grads, strict=True))

        def first(index_q, weights, index_k, attn_score, index_score, topk_indices, sm_scale, loss_coeff, grad_loss):
            operands = (index_q, weights, index_k, attn_score, index_score, topk_indices)
            return run(*operands, grad_loss, sm_scale, loss_coeff)

        def second(
            index_q,
            weights,
            index_k,
            attn_score,
            index_score,
            topk_indices,
            grad_loss,
            sm_scale=1.0,
            loss_coeff=1.0,
            topk_indices_global=False,
            deterministic=False,
        ):
            assert topk_indices_global
            operands = (index_q, weights, index_k, attn_score, index_score, topk_indices)
            return run(*operands, grad_loss, sm_scale, loss_coeff, deterministic)

        return second if self.version >= (1, 26) else first


def selected_scores(q, k, w, index):
    """[T, K]: -inf in empty slots."""
    inside = index >= 0
    key = k[index.clamp(min=0).long()].float().masked_fill(~inside[..., None], 0)
    found = torch.einsum("thn,th->tn", torch.einsum("thd,tnd->thn", q, key).relu(), w)
    return found.masked_fill(~inside, -torch.inf)


@pytest.fixture
def install(monkeypatch):
    """Install a generation's stand-in; `install(generation, major=9)` returns it."""

    def place(generation, major=9):
        found = Frontend(generation, major)
        module = ModuleType("cudnn")
        module.__spec__ = ModuleSpec("cudnn", None)
        module.DSA = found.namespace
        monkeypatch.setitem(sys.modules, "cudnn", module)
        monkeypatch.setattr(vendors.importlib.metadata, "version", lambda name: generation)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
        monkeypatch.setattr(gc, "collect", lambda: 0)
        for cached in (frontend.entries, frontend.takes, vendors.version_of):
            cached.cache_clear()
        return found

    yield place
    for cached in (frontend.entries, frontend.takes, vendors.version_of):
        cached.cache_clear()
