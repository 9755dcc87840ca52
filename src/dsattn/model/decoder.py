"""A decoder-only language model with DeepSeek Sparse Attention: embedding, the layers of `layer.py`, norm and head.

State-dict names are those of the Hugging Face models: model.layers.0.self_attn.q_a_proj.weight, lm_head.weight, ...
Letters: T rows, M model width.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dsattn.config import ModelConfig
from dsattn.errors import InputError
from dsattn.keys import Layout
from dsattn.model.layer import LayerOutput, decoder_layers
from dsattn.model.moe import MoE, Routing
from dsattn.model.mtp import IGNORED_LABEL, predict_ahead, shifted
from dsattn.model.sharing import Sharing
from dsattn.nn import LightningIndexer
from dsattn.nn.attention import SelfAttention, without_padding
from dsattn.nn.draw import normal_
from dsattn.nn.embedding import Embedding
from dsattn.nn.linear import local
from dsattn.nn.linear_attention import KDASelfAttention
from dsattn.nn.norm import RMSNorm
from dsattn.nn.state import SPARSE, LayerCache, Pass
from dsattn.selection import Selection


@dataclass(frozen=True)
class DecoderOutput:
    """hidden: [T, M], after the last norm; zeros in padding rows.

    selections: by index of the layer that selected. kl: fp32 scalar by layer index, sum over real rows / divisor each.
    caches: one a layer, where caches were given. ahead: [T, M] of each depth of multi-token prediction, where they ran;
    depth k has index num_layers + k - 1 in `selections` and `kl`. routing: by index of the layer that owns the experts.
    """

    hidden: Tensor
    selections: dict[int, Selection]
    kl: dict[int, Tensor]
    caches: tuple[LayerCache, ...] | None
    ahead: tuple[Tensor, ...] = ()
    routing: dict[int, Routing] = field(default_factory=dict)

    @property
    def kl_sum(self) -> Tensor | None:
        """The indexers' loss, summed over layers; None where no layer computed one."""
        return torch.stack(tuple(self.kl.values())).sum() if self.kl else None

    @property
    def balance_sum(self) -> Tensor | None:
        """The sequence-wise balance loss of the experts, summed over layers; None where no layer computed one."""
        parts = [routing.balance for routing in self.routing.values() if routing.balance is not None]
        return torch.stack(parts).sum() if parts else None


class Backbone(nn.Module):
    """Embedding, layers and last norm."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.sources = config.selection_sources[: config.num_layers]
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, deterministic=config.dsa.deterministic)
        self.layers = nn.ModuleList(decoder_layers(config))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(
        self,
        tokens: Tensor,
        layout: Layout,
        run: Pass,
        caches: Sequence[LayerCache] | None = None,
        tokens_ahead: Tensor | None = None,
    ) -> DecoderOutput:
        config = self.config
        hidden = self.embed(tokens, layout)
        sharing = Sharing(config.selection_sources, teach=config.dsa.multi_layer_teacher and caches is None)
        routing: dict[int, Routing] = {}
        hidden, held = self.run_layers(range(config.num_layers), hidden, layout, run, sharing, routing, caches)
        hidden, ahead = self.norm(hidden), ()
        if tokens_ahead is not None:
            ahead = self.run_depths(range(len(tokens_ahead)), hidden, tokens_ahead, layout, run, sharing, routing)
        return DecoderOutput(hidden, sharing.selections, sharing.kl, held, ahead, routing)

    def embed(self, tokens: Tensor, layout: Layout) -> Tensor:
        """tokens [T] -> [T, M], zeros in padding rows."""
        return without_padding(self.embed_tokens(tokens.masked_fill(~layout.real_rows, 0)), layout)

    def run_layers(
        self,
        layers: Iterable[int],
        hidden: Tensor,
        layout: Layout,
        run: Pass,
        sharing: Sharing,
        routing: dict[int, Routing],
        caches: Sequence[LayerCache] | None = None,
    ) -> tuple[Tensor, tuple[LayerCache, ...] | None]:
        """The residual stream [T, M] behind these decoder layers, and their grown caches where there are caches.

        sharing, routing: get what the layers give, by layer.
        """
        grown: list[LayerCache] = []
        for index in layers:
            cache = None if caches is None else caches[index]
            selection, own = sharing.before(index, run)
            out: LayerOutput = self.layers[index](hidden, layout, own, selection=selection, cache=cache)
            hidden = out.hidden
            sharing.after(index, out)
            if out.routing is not None:
                routing[index] = out.routing
            if out.cache is not None:
                grown.append(out.cache)
            del out  # what `sharing` does not keep of it goes before the next layer runs
        return hidden, None if caches is None else tuple(grown)

    def run_depths(
        self,
        depths: Iterable[int],
        hidden: Tensor,
        tokens_ahead: Tensor,
        layout: Layout,
        run: Pass,
        sharing: Sharing,
        routing: dict[int, Routing],
    ) -> tuple[Tensor, ...]:
        """[T, M] of each of these depths (from 0) of multi-token prediction.

        hidden: of the depth before them, or of the decoder, normed. tokens_ahead: [N, T], of all depths.
        """
        config = self.config
        embedded = ((depth, self._embed_ahead(tokens_ahead[depth])) for depth in depths)
        layers = list(self.layers)[config.num_layers :]
        return predict_ahead(layers, config, hidden, embedded, layout, run, sharing, routing)

    def _embed_ahead(self, tokens: Tensor) -> Tensor:
        nobody = tokens == IGNORED_LABEL
        return self.embed_tokens(tokens.masked_fill(nobody, 0)).masked_fill(nobody[:, None], 0)


class Decoder(nn.Module):
    """The language model. Fresh weights are drawn when made; on the meta device, call `reset_parameters` later."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        device = torch.get_default_device()
        with torch.device("meta"):  # layers of torch would draw weights that nobody wants
            self.model = Backbone(config)
            tied = config.tie_embeddings
            self.lm_head = None if tied else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if device.type != "meta":
            self.to_empty(device=device).reset_parameters()

    def forward(
        self,
        tokens: Tensor,
        layout: Layout,
        run: Pass = SPARSE,
        *,
        caches: Sequence[LayerCache] | None = None,
        tokens_ahead: Tensor | None = None,
    ) -> DecoderOutput:
        """One micro-batch.

        tokens: [T] int64; what stands in padding rows is not read. caches: one a layer (`empty_caches` to begin);
        then layout is `Layout.continuation(caches[0].num_rows, T)`, and the output's caches hold these rows too.
        tokens_ahead: [N, T] int64, `model.mtp.look_ahead` of the whole pack's tokens; needed for multi-token prediction
        where these rows are a part of it. Raises InputError where sizes do not fit.
        """
        if tokens.shape != layout.real_rows.shape:
            raise InputError(f"tokens must be {list(layout.real_rows.shape)} by the layout, got {list(tokens.shape)}")
        if caches is not None and len(caches) != self.config.num_layers:
            raise InputError(f"caches has {len(caches)} entries for {self.config.num_layers} layers; give one each")
        depths = self.config.mtp.depths
        if run.with_mtp and (depths == 0 or caches is not None):
            why = "decoding with caches knows none" if depths else "the model has mtp.depths=0"
            raise InputError(f"with_mtp=True asks for tokens ahead, but {why}; leave it None")
        wanted = depths > 0 and caches is None and (self.training if run.with_mtp is None else run.with_mtp)
        tokens_ahead = shifted("tokens_ahead", tokens_ahead, tokens, layout, depths) if wanted else None
        return self.model(tokens, layout, run, caches, tokens_ahead)

    def empty_caches(self) -> tuple[LayerCache, ...]:
        """Caches that have seen no row."""
        return (LayerCache(),) * self.config.num_layers

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, M] -> [T, vocab], in the layers' dtype."""
        return F.linear(hidden, self.model.embed_tokens.weight) if self.lm_head is None else self.lm_head(hidden)

    def lm_loss(
        self, hidden: Tensor, labels: Tensor, divisor: int | float | Tensor | None = None, *, chunk_rows: int = 4096
    ) -> Tensor:
        """Cross entropy summed over the rows with a label, in fp32, over `divisor`.

        labels: [T] int64, -100 for none; such rows are not read, whatever `hidden` holds there. divisor: labels of the
        whole global batch; None takes these rows' own, at least 1. chunk_rows: rows whose logits are alive at once;
        they are made again in the backward, so [T, vocab] is never whole.
        """
        if labels.shape != hidden.shape[:1]:
            raise InputError(f"labels must be [{hidden.shape[0]}] to meet hidden, got {list(labels.shape)}")
        unlabelled = labels == IGNORED_LABEL
        if divisor is None:
            divisor = (~unlabelled).sum().clamp(min=1)
        hidden = hidden.masked_fill(unlabelled[:, None], 0)
        losses = [
            checkpoint(self._summed_loss, rows, targets, use_reentrant=False, preserve_rng_state=False)
            for rows, targets in zip(hidden.split(chunk_rows), labels.split(chunk_rows), strict=True)
        ]
        return torch.stack(losses).sum() / divisor

    def mtp_losses(
        self,
        ahead: Sequence[Tensor],
        labels: Tensor,
        layout: Layout,
        divisor: int | float | Tensor | None = None,
        *,
        labels_ahead: Tensor | None = None,
    ) -> Tensor:
        """[N]: the loss of each depth of multi-token prediction, a sum like `lm_loss` over the same divisor.

        ahead: of the output. labels, divisor: as for `lm_loss`; depth k has fewer labels and the same divisor
        (DeepSeek-V3, eq. 24). labels_ahead: [N, T], as tokens_ahead.
        """
        if divisor is None:
            divisor = (labels != IGNORED_LABEL).sum().clamp(min=1)
        labels_ahead = shifted("labels_ahead", labels_ahead, labels, layout, len(ahead))
        return torch.stack([self.lm_loss(*one, divisor) for one in zip(ahead, labels_ahead, strict=True)])

    def _summed_loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = self.logits(hidden)
        wide = torch.promote_types(logits.dtype, torch.float32)
        return F.cross_entropy(logits.to(wide), labels, ignore_index=IGNORED_LABEL, reduction="sum")

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Fresh weights, the backbone's first: a seed gives the same backbone whatever MTP and the indexers' geometry.

        Normal with `init_std`, divided by sqrt(2 num_layers) where a projection adds to the residual stream; norms are
        identities, sinks and routing biases zero; for linear attention see `KDASelfAttention.reset_parameters`.
        Ranks that hold parts of weights get their parts of what one process would draw: see `nn/draw.py`.
        """
        std = self.config.init_std
        residual = std / math.sqrt(2 * self.config.num_layers)
        for name, module in self._drawn():
            if isinstance(module, LightningIndexer):
                module.reset_parameters(std, generator)
            elif isinstance(module, nn.Linear | nn.Embedding):
                adds = name.endswith(("o_proj", "down_proj"))
                normal_(module.weight, residual if adds else std, generator)
            elif isinstance(module, RMSNorm):
                module.reset_parameters()
            elif isinstance(module, MoE):
                module.reset_parameters(std, residual, generator)
            elif isinstance(module, KDASelfAttention):
                module.reset_parameters(std, generator)
            elif isinstance(module, SelfAttention) and module.sinks is not None:
                nn.init.zeros_(local(module.sinks))

    def reset_indexers(self, generator: torch.Generator | None = None) -> None:
        """Fresh weights for every indexer, nothing else."""
        for _, module in self._drawn():
            if isinstance(module, LightningIndexer):
                module.reset_parameters(self.config.init_std, generator)

    def _drawn(self) -> Iterator[tuple[str, nn.Module]]:
        """Modules by name, in the order that weights are drawn in: the backbone's, those of MTP, the indexers whole."""
        indexers = {module for indexer in self.indexers() for module in indexer.modules()}
        ahead = {module for layer in self.model.layers[self.config.num_layers :] for module in layer.modules()}
        named = list(self.named_modules())
        rest = [(name, module) for name, module in named if module not in indexers]
        yield from sorted(rest, key=lambda one: one[1] in ahead)
        yield from ((name, module) for name, module in named if isinstance(module, LightningIndexer))

    def move_routing_biases(self, loads: Mapping[int, Tensor], rate: float) -> None:
        """Once after each optimiser step: every router's bias moves by `rate` towards equal loads.

        loads: [E] by layer index, summed over the whole global batch: over micro-batches and data-parallel ranks.
        """
        for index, load in loads.items():
            moe = cast(MoE, self.model.layers[index].mlp)
            moe.move_bias(load, rate)

    def indexers(self) -> list[LightningIndexer]:
        """Every layer's indexer, in order; layers that share or are dense have none."""
        return [module for module in self.modules() if isinstance(module, LightningIndexer)]
