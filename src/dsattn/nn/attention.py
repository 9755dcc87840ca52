"""What MLA and GQA share: which keys a layer reads, who chose them, and what its indexer learns.

    mode     attention            indexer                                KL
    dense    every visible key    not run                                none
    warmup   every visible key    run where something asks for it        over every visible key
    sparse   the selected keys    chooses, in a layer that selects       over the selected keys
    frozen   the selected keys    chooses, without gradients             none

State is passed and returned: a `Selection` from an earlier layer, a `LayerCache` and what `Handed` names come in and go
out as values.
Letters: T rows, S keys, M model width, H heads, V value width, C latent width, G kv groups, d head width.
"""

import contextlib
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from dsattn.config import DSAConfig, GQAConfig, MLAConfig
from dsattn.errors import InputError
from dsattn.keys import Layout
from dsattn.nn.indexer import IndexerOutput, LightningIndexer
from dsattn.nn.state import AttentionOutput, Handed, LayerCache, Observation, Pass
from dsattn.ops import indexer_kl, select_keys
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

    def attend(
        self,
        q: Tensor,
        entries: tuple[Tensor, ...],
        index_inputs: tuple[Tensor, Tensor | None],
        layout: Layout,
        run: Pass,
        selection: Selection | None,
        cache: LayerCache | None,
    ) -> AttentionOutput:
        """Attend by the pass's mode. `hidden` of the result is [T, H, V]: the caller projects it.

        q: [T, H, C or d]. entries: the keys and values of this pass's rows, as a LayerCache names them.
        index_inputs: (hidden, query latent or None), for the indexer.
        """
        handed = run.handed or Handed()
        if handed.entries is not None and handed.entries is not entries:
            raise InputError(f"handed.entries is given, but layer {self.layer_index} has keys of its own; hand it none")
        dense, chooses, learns = self._plan(run, selection)
        observed = run.mode != "dense" and (run.probe is not None or cache is not None)
        index = None
        if self.indexer is not None and (learns or observed or (chooses and not run.holds("selection"))):
            hidden, q_latent = index_inputs
            with contextlib.nullcontext() if learns else torch.no_grad():
                from_hidden = self.dsa.indexer.query_from == "hidden"
                index = self.indexer(hidden, None if from_hidden else q_latent, layout.positions)
        if cache is not None:
            cache = cache.extended(entries, index.k if index else None)
            entries = cache.entries
            index = index._replace(k=cache.index_keys) if index else None
        self._check_keys(entries[0], layout)

        if chooses:
            selection = run.value("selection", self._select, index, layout)
        kl = None
        taught = index if self.indexer is not None else handed.index
        if selection is None:
            assert dense, "the plan promised a selection"
            out, lse = self._dense(q, entries, layout)
            if taught is not None and learns:
                kl = run.graph("loss", self._kl, taught, q, entries, lse, None, layout, run)
        elif taught is not None and learns:
            out, lse, kl = self._sparse_and_kl(taught, q, entries, selection, layout, run)
        else:
            out, lse = self._sparse(q, entries, selection)
        if run.probe is not None:
            seen = (q.detach(), entries[0].detach(), lse.detach())
            own = index and IndexerOutput(*(x.detach() for x in index))
            run.probe(self.layer_index, Observation(*seen, self.config.scale, own, selection, layout))
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
                "pass the selection of its source layer (model.sharing.source_layer)"
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

    def _check_keys(self, keys: Tensor, layout: Layout) -> None:
        if layout.num_keys != keys.shape[0]:
            raise InputError(
                f"layout has {layout.num_keys} keys, but there are {keys.shape[0]} rows of them; "
                "with a cache, use Layout.continuation(cache.num_rows, tokens)"
            )

    def _select(self, index: IndexerOutput | None, layout: Layout) -> Selection:
        dsa = self.dsa
        assert index is not None, "only a replay has none, and it does not select"
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
        entries: tuple[Tensor, ...],
        lse: Tensor,
        selection: Selection | None,
        layout: Layout,
        run: Pass,
    ) -> Tensor:
        return indexer_kl(
            *index,
            q,
            entries[0],
            lse,
            layout.keys,
            selection,
            scale=self.config.scale,
            real_rows=layout.real_rows,
            divisor=run.kl_divisor,
            relu=self.dsa.indexer.relu,
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
        self,
        index: IndexerOutput,
        q: Tensor,
        entries: tuple[Tensor, ...],
        selection: Selection,
        layout: Layout,
        run: Pass,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(out, lse, kl) over the selected keys; a layer with an op for both at once overrides this."""
        out, lse = self._sparse(q, entries, selection)
        return out, lse, run.graph("loss", self._kl, index, q, entries, lse, selection, layout, run)

    def _options(self, dtype: torch.dtype) -> dict[str, Any]:
        """The keyword arguments that every attention op takes."""
        sink = None if self.sinks is None else self.sinks.to(torch.promote_types(dtype, torch.float32))
        return {
            "scale": self.config.scale,
            "sink": sink,
            "backend": self.dsa.backend,
            "deterministic": self.dsa.deterministic,
        }


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
