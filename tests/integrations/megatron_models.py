"""What is special to our layers in Megatron's models; `megatron_parity.py` runs this in one of its processes."""

import contextlib
import io
import warnings
from typing import Any

import megatron_core as core
import torch
from megatron_parity import PACK, Report, once, watching_cut_offs
from torch import Tensor, nn

from dsattn import Layout
from dsattn.integrations import megatron_attention
from dsattn.integrations.megatron import Options, core_attention, from_megatron, self_attention, with_dsattn
from dsattn.integrations.megatron_names import from_megatron_names
from dsattn.integrations.stored import stored
from dsattn.model import Decoder

SPARSE = {"dsa_indexer_use_sparse_loss": True}
VOCABULARY = 32
MODEL = {
    "mtp_num_layers": 1,
    "ffn_hidden_size": 32,
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "moe_layer_freq": [0, 1],
    "moe_router_topk": 2,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 1.5,
    "moe_token_dispatcher_type": "allgather",
}


def keys(report: Report, world: core.World) -> None:
    """State-dict and sharded-state-dict keys, shapes and offsets are Megatron's."""
    config = core.config_of()
    spec = core.attention_spec(config)
    theirs = core.build(spec, config, world.groups())
    for whole in (False, True):
        ours = core.build(with_dsattn(spec, config, whole=whole), config, world.groups())
        case = "self-attention" if whole else "core attention"
        shapes = [
            {name: getattr(one, "shape", None) for name, one in module.state_dict().items()}
            for module in (theirs, ours)
        ]
        report.exact("state-dict keys", case, shapes[0] == shapes[1])
        metadata = {"dp_cp_group": world.alone}
        sharded = [module.sharded_state_dict("layer.", (), metadata) for module in (theirs, ours)]
        told = [
            {name: (getattr(one, "key", ""), getattr(one, "global_offset", ())) for name, one in held.items()}
            for held in sharded
        ]
        report.exact("sharded-state-dict keys", case, told[0] == told[1])


class Gated(nn.Module):
    """Megatron's linear_proj behind a gate, as the text of the feature describes it."""

    def __init__(self, projection: nn.Module, config: Any, channels: int):
        super().__init__()
        self.projection, self.width = projection, config.v_head_dim
        self.weight = nn.Parameter(torch.randn(channels, config.hidden_size) * 0.3)
        self.hidden: Tensor | None = None

    def forward(self, out: Tensor) -> Any:
        assert self.hidden is not None
        gate = (self.hidden @ self.weight.t()).float().sigmoid().to(out.dtype)
        heads = out.unflatten(-1, (-1, self.width))
        gate = gate.unflatten(-1, (heads.shape[-2], -1))
        return self.projection((heads * gate).flatten(-2))


def gate(report: Report, world: core.World, generator: torch.Generator) -> None:
    """The output gate, whose field Megatron's configuration refuses when it is made."""
    for granularity in ("elementwise", "headwise"):
        config = core.config_of(**SPARSE)
        spec = core.attention_spec(config)
        theirs = core.build(spec, config, world.groups())
        config.attention_output_gate, config.gated_attention_proj_granularity = True, granularity
        ours = core.build(with_dsattn(spec, config, whole=True), config, world.groups())
        gated = Gated(theirs.linear_proj, config, ours.linear_gate.weight.shape[0])
        held = theirs.state_dict() | {"linear_gate.weight": gated.weight.detach()}
        ours.load_state_dict(held)
        theirs.linear_proj = gated
        theirs.register_forward_pre_hook(lambda module, args: setattr(module.linear_proj, "hidden", args[0]))
        hidden, grad = (torch.randn(24, 1, core.HIDDEN, generator=generator) for _ in "ab")
        found = [once(one, hidden, grad, PACK) for one in (theirs, ours)]
        report.add("output gate", f"{granularity}, output", found[0][0], found[1][0])
        report.add("output gate", f"{granularity}, gradient of the input", found[0][1], found[1][1])
        report.add("output gate", f"{granularity}, its weight", gated.weight.grad, ours.linear_gate.weight.grad)


def deferred(report: Report, world: core.World) -> None:
    """backward_dw asks every layer whose forward ran, and linear_kv_up_proj, which never ran, for nothing."""
    for coefficient, asked in ((0.5, 5), (None, 2)):
        config = core.config_of(dsa_indexer_loss_coeff=coefficient)
        config.delay_wgrad_compute = True  # refused when it is made, without experts on several ranks
        ours = core.build(with_dsattn(core.attention_spec(config), config, whole=True), config, world.groups())
        ours.linear_kv_up_proj.backward_dw = None  # calling it raises
        ours.backward_dw()
        at_once = (
            not ours.linear_kv_up_proj.config.delay_wgrad_compute and ours.linear_q_up_proj.config.delay_wgrad_compute
        )
        report.exact("deferred weight gradients", f"up-projection, loss coefficient {coefficient}", at_once)
        calls = [one for one in ours.modules() if isinstance(one, core.Duplicated) and one.calls == ["backward_dw"]]
        report.exact("deferred weight gradients", f"loss coefficient {coefficient}", len(calls) == asked)


def negative_controls(report: Report, world: core.World, generator: torch.Generator) -> None:
    """What must differ does: padding that reads nothing, and an indexer whose lanes rotate otherwise."""
    run = {"lengths": [5, 0, 9], "slots": [8, 4, 12]}
    hidden, grad = (torch.randn(24, 1, core.HIDDEN, generator=generator) for _ in "ab")
    for case, fields, options, lengths in (
        ("padding", {}, Options(), run),
        ("rotated lanes", {"dsa_indexer_rope_interleaved": True}, Options(rows="megatron"), PACK),
    ):
        config, other = core.config_of(**SPARSE), core.config_of(**SPARSE, **fields)
        spec = core.attention_spec(config)
        theirs = core.build(spec, config, world.groups())
        ours = core.build(with_dsattn(spec, other, options=options), other, world.groups())
        ours.load_state_dict(theirs.state_dict())
        outs = [once(one, hidden, grad, lengths)[0] for one in (theirs, ours)]
        report.exact("negative controls", case, bool((outs[0] - outs[1]).abs().max() > 1e-2 * outs[0].abs().max()))


def recompute(report: Report, world: core.World, generator: torch.Generator) -> None:
    """Selective and full recompute give the plain gradients, and a packed replay never selects again."""
    config = core.config_of(**SPARSE)
    spec = core.attention_spec(config)
    plain = core.build(with_dsattn(spec, config, whole=True), config, world.groups())
    hidden, grad = (torch.randn(24, 1, core.HIDDEN, generator=generator) for _ in "ab")
    wanted = once(plain, hidden, grad, PACK)
    select, chosen = megatron_attention.select_keys, []

    def counting(*args: Any, **rest: Any) -> Any:
        chosen.append(select(*args, **rest))
        return chosen[-1]

    for case, fields in (
        ("core_attn", {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}),
        ("mla_up_proj", {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}),
    ):
        config = core.config_of(**SPARSE, **fields)
        again = core.build(with_dsattn(core.attention_spec(config), config, whole=True), config, world.groups())
        again.load_state_dict(plain.state_dict())
        chosen.clear()
        megatron_attention.select_keys = counting
        found = once(again, hidden, grad, PACK)
        megatron_attention.select_keys = select
        report.exact("recompute", f"{case}, one selection", len(chosen) == 1)
        report.add("recompute", f"{case}, output", wanted[0], found[0])
        report.add("recompute", f"{case}, gradient of the input", wanted[1], found[1])
        for (name, a), b in zip(plain.named_parameters(), again.parameters(), strict=True):
            report.add("recompute", f"{case}, {name}", a.grad, b.grad)


def expanded(report: Report, world: core.World, generator: torch.Generator) -> None:
    """DSAttention with a key and a value a head, as hybrid models infer with it."""
    from megatron.core.transformer.enums import AttnMaskType

    config = core.config_of()
    spec = core.attention_spec(config)
    both = [core.build(one, config, world.groups()) for one in (spec, with_dsattn(spec, config))]
    theirs, ours = (one.core_attention for one in both)
    ours.load_state_dict(theirs.state_dict())
    shapes = [(24, 1, 4, 24), (24, 1, 4, 24), (24, 1, 4, 16), (24, 1, core.HIDDEN), (24, 1, 24)]
    for case, sparse in (("dense loss", False), ("sparse loss", True)):
        config.dsa_indexer_use_sparse_loss = sparse
        decided, found = [False], []
        while not all(decided):
            given = [torch.randn(shape, generator=generator) for shape in shapes]
            with watching_cut_offs() as decided:
                found = [_attended(module, given, AttnMaskType.causal) for module in (theirs, ours)]
        for a, b in zip(*found, strict=True):
            report.add("a key and a value a head", case, a, b)


def _attended(module: Any, given: list[Tensor], mask_type: Any) -> list[Tensor]:
    """The output, the gradients of query, key and value, and those of the indexer."""
    module.train()
    module.zero_grad()
    q, k, v, x, qr = (one.clone().requires_grad_() for one in given)
    micro_batch = core.packed(PACK["lengths"])
    out = module(q, k, v, None, x, qr, attn_mask_type=mask_type, packed_seq_params=micro_batch)
    out.square().sum().backward()
    return [out.detach(), q.grad, k.grad, v.grad, *(one.grad for one in module.parameters())]


def _specs(config: Any) -> tuple[Any, Any]:
    """Megatron's own specs of a GPT's decoder block and of its MTP block, of layers that exist here."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec_for_backend
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    class Provider(LocalSpecProvider):
        def linear(self) -> type:
            return core.Duplicated

        def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, **rest: Any) -> type:
            return core.KeyNorm if for_qk and not rms_norm else core.LatentNorm

    layers = variants.get_transformer_layer_with_experimental_attention_variant_spec(config, backend=Provider())
    block = TransformerBlockSubmodules(layer_specs=layers, layer_norm=core.LatentNorm)
    return block, get_gpt_mtp_block_spec_for_backend(config, layers[-1], backend=Provider())


def whole_models(report: Report, generator: torch.Generator) -> None:
    """A GPT model with experts and MTP: trained with our layers, and the same function as our Decoder."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        _whole_models(report, generator)


def _whole_models(report: Report, generator: torch.Generator) -> None:
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

    config = core.config_of(**SPARSE, **MODEL)
    block, mtp = _specs(config)
    given: dict[str, Any] = {"position_embedding_type": "none", "share_embeddings_and_output_weights": False}
    arguments = (VOCABULARY, 24)
    model = GPTModel(config, with_dsattn(block, config), *arguments, mtp_block_spec=with_dsattn(mtp, config), **given)
    ids = torch.randint(0, VOCABULARY, (2, 24), generator=generator)
    places = torch.arange(24).expand(2, -1)
    model(ids, places, None, labels=ids).mean().backward()
    report.exact("whole models", "every weight learns", all(one.grad is not None for one in model.parameters()))
    numbers = [one.layer_number for one in model.modules() if hasattr(one, "source_layer")]
    report.exact("whole models", "MTP layers are numbered behind the decoder's", numbers == [1, 2, 3])
    stack = with_dsattn(hybrid_stack_spec, config, whole=True).submodules.dsa_layer.submodules.self_attention
    ours = (self_attention(), core_attention())
    report.exact("whole models", "hybrid stacks", (stack.module, stack.submodules.core_attention.module) == ours)

    held = {name: stored(one) for name, one in model.state_dict().items() if one is not None}
    told = vars(config) | {"vocab_size": VOCABULARY, "untie_embeddings_and_output_weights": True}
    ours_config = from_megatron(told)
    decoder = Decoder(ours_config)
    tensors = from_megatron_names(held, ours_config)
    decoder.load_state_dict({name: one.read() for name, one in tensors.items()})
    with torch.no_grad():
        theirs = model.eval()(ids, places, None)
        mine = decoder.logits(decoder.eval()(ids.flatten(), Layout.causal(24, batch=2)).hidden)
    report.add("whole models", "logits of our Decoder", theirs.flatten(0, 1), mine)


def run(report: Report, world: core.World, generator: torch.Generator) -> None:
    keys(report, world)
    gate(report, world, generator)
    deferred(report, world)
    negative_controls(report, world, generator)
    expanded(report, world, generator)
    recompute(report, world, generator)
    whole_models(report, generator)
