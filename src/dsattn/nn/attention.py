"""What MLA and GQA share: which keys a layer reads, who chose them, and what its indexer learns.

    mode     attention            indexer                                KL
    dense    every visible key    not run                                none
    warmup   every visible key    run where something asks for it        over every visible key
    sparse   the selected keys    chooses, in a layer that selects       over the selected keys
    frozen   the selected keys    chooses, without gradients             none

State is passed and returned: a `Selection` from an earlier layer, a `LayerCache` and what `Handed` names come in and go
out as values.
Other ranks may hold rows, keys and heads: see `nn/ranks.py`.
Letters: T my rows, R the rows that heads read, S keys, M model width, H heads here, V value width, C latent width, G kv
groups here, d head width.
"""

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from dsattn.config import DSAConfig, GQAConfig, MLAConfig
from dsattn.errors import InputError
from dsattn.keys import Layout
from dsattn.nn.indexer import IndexerOutput, LightningIndexer
from dsattn.nn.linear import local
from dsattn.nn.state import AttentionOutput, Handed, LayerCache, Observation, Pass, Turn
from dsattn.ops import indexer_kl, select_keys
from dsattn.ops.dsa import shares_work
from dsattn.ops.invert import to_share
from dsattn.selection import Selection

Role = Literal["selects", "shares", "dense"]


class SelfAttention(nn.Module):
    """Base of MLASelfAttention and GQASelfAttention: they project, this attends.

    role: `selects` owns an indexer; `shares` owns none and must be handed a selection in modes `sparse` and `frozen`;
    `dense` attends to every key in every mode. None: `selects`, or `dense` without a dsa config.
    """

    def __init__(
        self,
        hidden_size: int,
        latent_size: int | None,
        config: MLAConfig | GQAConfig,
        dsa: DSAConfig | None,
        role: Role | None,
        layer_index: int,
    ):
        super().__init__()
        if role is None:
            role = "dense" if dsa is None else "selects"
        if role not in get_args(Role):
            raise InputError(f"role={role!r} must be one of {', '.join(get_args(Role))}")
        if dsa is None and role != "dense":
            raise InputError(f"dsa=None, but role={role!r} needs a DSAConfig; pass one, or role='dense'")
        self.config = config
        self.role: Role = role
        self.dsa = dsa if dsa is not None else DSAConfig()
        self.layer_index = layer_index
        self.indexer = self._new_indexer(hidden_size, latent_size) if self.role == "selects" else None
        self.sinks = nn.Parameter(torch.zeros(config.heads, dtype=torch.float32)) if config.sink else None

    def _new_indexer(self, hidden_size: int, latent_size: int | None) -> LightningIndexer:
        indexer = self.dsa.indexer
        query_size = hidden_size if indexer.query_from == "hidden" else latent_size
        if query_size is None:
            raise InputError(
                "indexer.query_from='q_latent', but this attention has no query latent; "
                "set query_from='hidden', or MLAConfig.q_lora_rank"
            )
        return LightningIndexer(hidden_size, query_size, indexer, self.config.rope)

    def begin(self, layout: Layout, run: Pass, selection: Selection | None, cache: LayerCache | None) -> Turn:
        """What this pass does here. Raises InputError where a selection is missing, or would be ignored, and so on."""
        dense, chooses, learns = self._plan(run, selection)
        if run.ranks is not None and cache is not None:
            raise InputError("cache is given with ranks, but decoding runs on one process; pass Pass(ranks=None)")
        if run.ranks is not None and learns and run.kl_divisor is None:
            raise InputError(
                "kl_divisor=None with ranks: pass the real rows of the whole global batch; no rank has all"
            )
        if chooses and run.kept is not None and not run.kept.keeps("selection") and shares_work(self.dsa.deterministic):
            raise InputError(
                f"reuse_selection=False, but layer {self.layer_index} is not deterministic, and a replay that selects "
                "other keys gives gradients of another function; set DSAConfig.deterministic=True or "
                "settings(deterministic=True), or reuse selections"
            )
        observed = run.mode != "dense" and (run.probe is not None or cache is not None)
        scores = self.indexer is not None and (learns or observed or (chooses and not run.holds("selection")))
        return Turn(layout, run.together.head_rows(layout), run, selection, cache, dense, chooses, learns, scores)

    def index_keys(self, turn: Turn, hidden: Tensor) -> tuple[Tensor, ...]:
        """(the indexer's keys of my rows,), or nothing where it does not run."""
        if not turn.scores or self.indexer is None:
            return ()
        with turn.taught():
            return (self.indexer.keys(hidden, turn.layout.positions),)

    def index(
        self, turn: Turn, hidden: Tensor, q_latent: Tensor | None, keys: tuple[Tensor, ...]
    ) -> IndexerOutput | None:
        """The indexer's output, `keys` being those of all ranks; None where it does not run.

        Its queries are of all rows that heads read, or of mine alone (`Ranks.splits_indexer`).
        """
        if not keys or self.indexer is None:
            return None
        ranks, from_hidden = turn.run.together, self.dsa.indexer.query_from == "hidden"
        with turn.taught():
            index = self.indexer(hidden, None if from_hidden else q_latent, turn.layout.positions, *keys)
            return index if ranks.splits_indexer else IndexerOutput(ranks.rows(index.q), index.k, ranks.rows(index.w))

    def attend(
        self,
        turn: Turn,
        q: Tensor,
        entries: tuple[Tensor, ...],
        index: IndexerOutput | None,
    ) -> AttentionOutput:
        """Attend by the pass's mode. `hidden` of the result is [R, H, V]: the caller projects it.

        q: [R, H, C or d], of the rows and heads of this rank. entries: keys and values of all rows, as a LayerCache
        names them.
        """
        run, cache, selection = turn.run, turn.cache, turn.selection
        handed = run.handed or Handed()
        if handed.entries is not None and handed.entries is not entries:
            raise InputError(f"handed.entries is given, but layer {self.layer_index} has keys of its own; hand it none")
        if cache is not None:
            cache = cache.extended(entries, index.k if index else None)
            entries = cache.entries
            index = index._replace(k=cache.index_keys) if index else None
        self._check(q, entries[0], turn)

        if turn.chooses:
            selection = run.value("selection", self._select, index, turn)
        kl = None
        taught = index if self.indexer is not None else handed.index
        if selection is None:
            assert turn.dense, "the plan promised a selection"
            out, lse = self._dense(q, entries, turn.rows)
            if taught is not None and turn.learns:
                kl = run.graph("loss", self._kl, taught, q, entries[0], lse, None, turn)
        elif taught is not None and turn.learns:
            out, lse, kl = self._sparse_and_kl(taught, q, entries, selection, turn)
        else:
            out, lse = self._sparse(q, entries, selection)
        if run.probe is not None:
            seen = (q.detach(), entries[0].detach(), lse.detach())
            run.probe(self.layer_index, Observation(*seen, self.config.scale, _seen(index, run), selection, turn.rows))
        return AttentionOutput(out, selection, kl, cache, index, entries)

    def reads_every_key(self, run: Pass) -> bool:
        """Whether this layer attends to all visible keys, not to selected ones."""
        return self.role == "dense" or run.mode in ("dense", "warmup")

    def _plan(self, run: Pass, selection: Selection | None) -> tuple[bool, bool, bool]:
        """(every visible key is read, the indexer chooses, an indexer learns: the own one, or the one that is handed).

        Raises InputError where a selection is missing, or would be ignored.
        """
        dense = self.reads_every_key(run)
        if dense and selection is not None:
            why = "has role 'dense'" if self.role == "dense" else f"runs in mode {run.mode!r}"
            raise InputError(f"selection is given, but layer {self.layer_index} {why} and reads every key; pass None")
        if not dense and self.role == "shares" and selection is None:
            raise InputError(
                f"selection=None, but layer {self.layer_index} has role 'shares' and owns no indexer; "
                "pass the selection of its source layer (ModelConfig.selection_sources)"
            )
        free = self.role == "selects" and selection is None
        teaches = self.role == "shares" and run.handed is not None and run.handed.index is not None
        wanted = run.with_kl if run.with_kl is not None else self.training and torch.is_grad_enabled()
        learns = (free or teaches) and wanted and run.mode in ("warmup", "sparse")
        if learns and self.dsa.indexer.pool_size > 1:
            raise InputError(
                f"mode={run.mode!r} asks for the indexer's loss, but layer {self.layer_index} selects pools of "
                f"{self.dsa.indexer.pool_size} keys: a pool's score teaches no single key; use Pass(mode='frozen'), "
                "Pass(with_kl=False), or pool_size=1"
            )
        return dense, free and not dense, learns

    def _check(self, q: Tensor, keys: Tensor, turn: Turn) -> None:
        if turn.rows.num_keys != keys.shape[0]:
            raise InputError(
                f"layout has {turn.rows.num_keys} keys, but there are {keys.shape[0]} rows of them; "
                "with a cache, use Layout.continuation(cache.num_rows, tokens); on ranks of cp, Pass(ranks=...)"
            )
        parts = turn.run.together.tp_size
        if q.shape[1] * parts != self.config.heads:
            raise InputError(
                f"layer {self.layer_index} holds {q.shape[1]} of {self.config.heads} heads, but the pass has {parts} "
                "tensor-parallel rank(s); split the model by parallel.tensor.split, and pass Pass(ranks=...)"
            )

    def _select(self, index: IndexerOutput | None, turn: Turn) -> Selection:
        """The selection of the rows that heads read, made ready for the layers that may share it."""
        selection, dsa = turn.run.together.selected(self._selected(index, turn), turn.rows), self.dsa
        options = {"deterministic": dsa.deterministic, "backend": dsa.backend}
        return to_share(selection, turn.rows.num_keys, **options) if dsa.shares else selection

    def _selected(self, index: IndexerOutput | None, turn: Turn) -> Selection:
        """The selection of the rows that the indexer has queries of."""
        dsa = self.dsa
        assert index is not None, "only a replay has none, and it does not select"
        layout = turn.index_rows
        if self.indexer is not None and dsa.indexer.pool_size > 1:
            options = {"precision": dsa.precision, "block_bytes": dsa.block_bytes, "backend": dsa.backend}
            return self.indexer.select_pools(index, layout, **options)
        return select_keys(
            *index,
            layout.keys,
            dsa.indexer.top_k,
            relu=dsa.indexer.relu,
            precision=dsa.precision,
            block_bytes=dsa.block_bytes,
            backend=dsa.backend,
        )

    def _kl(
        self,
        index: IndexerOutput,
        q: Tensor,
        keys: Tensor,
        lse: Tensor,
        selection: Selection | None,
        turn: Turn,
    ) -> Tensor:
        """q: [R, H, C], keys: [S, C] or [S, G, C], lse: [R, H]. Each tp rank's part, where they share its rows out."""
        return indexer_kl(
            *index,
            q,
            keys,
            lse,
            turn.rows.keys,
            selection,
            scale=self.config.scale,
            real_rows=turn.rows.real_rows,
            divisor=turn.kl_divisor,
            relu=self.dsa.indexer.relu,
            head_group=turn.run.together.head_group,
            backend=self.dsa.backend,
            deterministic=self.dsa.deterministic,
        )

    def _dense(self, q: Tensor, entries: tuple[Tensor, ...], layout: Layout) -> tuple[Tensor, Tensor]:
        """(out, lse) over every visible key."""
        raise NotImplementedError

    def _sparse(self, q: Tensor, entries: tuple[Tensor, ...], selection: Selection) -> tuple[Tensor, Tensor]:
        """(out, lse) over the selected keys."""
        raise NotImplementedError

    def _sparse_and_kl(
        self, index: IndexerOutput, q: Tensor, entries: tuple[Tensor, ...], selection: Selection, turn: Turn
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(out, lse, kl) over the selected keys; a layer with an op for both at once overrides this."""
        out, lse = self._sparse(q, entries, selection)
        return out, lse, turn.run.graph("loss", self._kl, index, q, entries[0], lse, selection, turn)

    def _options(self, dtype: torch.dtype) -> dict[str, Any]:
        """The keyword arguments that every attention op takes."""
        sink = None if self.sinks is None else local(self.sinks).to(torch.promote_types(dtype, torch.float32))
        return {
            "scale": self.config.scale,
            "sink": sink,
            "backend": self.dsa.backend,
            "deterministic": self.dsa.deterministic,
        }


def _seen(index: IndexerOutput | None, run: Pass) -> IndexerOutput | None:
    """Detached, of all rows that heads read."""
    if index is None:
        return None
    q, k, w = (x.detach() for x in index)
    ranks = run.together
    return IndexerOutput(ranks.rows(q), k, ranks.rows(w)) if ranks.splits_indexer else IndexerOutput(q, k, w)


def without_padding(hidden: Tensor, layout: Layout) -> Tensor:
    """hidden [T, M] with zeros in padding rows: what lies there, NaN too, must not reach a weight's gradient.

    Raises InputError unless hidden is [T, M] with the layout's T.
    """
    rows = layout.real_rows.shape[0]
    if hidden.dim() != 2 or hidden.shape[0] != rows:
        raise InputError(
            f"hidden must be [{rows}, M] to meet the layout, got {list(hidden.shape)}; fold a batch into T"
        )
    return hidden if layout.every_row_has_a_key else hidden.masked_fill(~layout.real_rows[:, None], 0)
