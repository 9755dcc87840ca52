"""Multi-token prediction against depths that are written out one by one, each with a copy of a repeated layer."""

import copy
import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from dsattn.config import DSAConfig, GQAConfig, IndexerConfig, MLAConfig, ModelConfig, MTPConfig
from dsattn.errors import InputError
from dsattn.keys import Layout
from dsattn.model import Decoder
from dsattn.model.decoder import DecoderOutput
from dsattn.model.layer import MTPLayer, decoder_layers
from dsattn.model.mtp import IGNORED_LABEL, look_ahead
from dsattn.nn.rope import rotary_table, rotate
from dsattn.nn.state import Pass

ROWS, TOP_K, VOCAB, LAYERS = 24, 5, 40, 2
MLA = MLAConfig(
    heads=2, q_lora_rank=12, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6, sink=True
)
GQA = GQAConfig(heads=4, kv_heads=2, head_dim=8, rope_dim=4, sink=True)
KINDS = {"mla": MLA, "gqa": GQA}
BOTH = ("latent_kv", "sparse_attention_index")
COMPONENTS = [(), BOTH[:1], BOTH[1:], BOTH]
LAYOUT = Layout.packed([9, 1, 0, 2, 11], padded=[10, 1, 1, 3, 11], total=28)


def config(attention: MLAConfig | GQAConfig = MLA, mtp: MTPConfig | None = None, dsa=None, **options) -> ModelConfig:
    source = "hidden" if isinstance(attention, GQAConfig) else "q_latent"
    indexer = IndexerConfig(heads=2, head_dim=8, top_k=TOP_K, query_from=source, rope_dim=4)
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "num_layers": LAYERS, "intermediate_size": 24, "init_std": 0.3}
    mtp = MTPConfig(depths=3) if mtp is None else mtp
    dsa = DSAConfig(indexer=indexer, **(dsa or {}))
    return ModelConfig(**{**sizes, "attention": attention, "dsa": dsa, "mtp": mtp, **options})


def repeated(*components: str, depths: int = 3) -> MTPConfig:
    return MTPConfig(depths=depths, repeated=True, shared_components=components)


def made(settings: ModelConfig) -> Decoder:
    """In fp64, with norms and sinks that are not the identity."""
    model = Decoder(settings).double().train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("sinks"):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def batch(layout: Layout = LAYOUT) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and labels that are the next token of the same document; padding holds what is no token."""
    tokens = torch.randint(0, VOCAB, layout.rows.shape).masked_fill(~layout.real_rows, -7)
    return tokens, look_ahead(tokens, layout, 1)[0]


def loss_of(model: Decoder, out: DecoderOutput, labels: torch.Tensor, layout: Layout = LAYOUT) -> torch.Tensor:
    total = model.lm_loss(out.hidden, labels, 20) + 0.7 * model.mtp_losses(out.ahead, labels, layout, 20).sum()
    return total if out.kl_sum is None else total + out.kl_sum


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}


def assert_close(got, wanted, **bar) -> None:
    torch.testing.assert_close(got, wanted, **{"rtol": 1e-8, "atol": 1e-9, **bar})


# Shifts


@pytest.mark.parametrize(
    "layout",
    [
        LAYOUT,
        Layout.packed([5, 3, 1], padded=[8, 3, 4], side="left"),
        Layout.causal(6, batch=3),
        Layout.packed([2, 2, 2], total=11),
        Layout.packed([], total=4),
        Layout.packed([]),
    ],
)
def test_look_ahead_is_a_walk_through_each_document(layout):
    values = torch.randint(0, 1000, layout.rows.shape)
    place = {}  # (document, position) -> row
    document = -1
    for row in range(len(values)):
        if layout.real_rows[row]:
            document += layout.positions[row].item() == 0
            place[document, layout.positions[row].item()] = row
    wanted = torch.full((4, len(values)), IGNORED_LABEL)
    for (document, position), row in place.items():
        for depth in range(4):
            if (there := place.get((document, position + depth + 1))) is not None:
                wanted[depth, row] = values[there]
    assert torch.equal(look_ahead(values, layout, 4), wanted)


def test_look_ahead_wants_the_whole_pack():
    for layout in (
        Layout.packed([8, 8], cp_size=2, cp_rank=1),
        Layout.causal(16).shard_rows(0, 2),
        Layout.continuation(8, 8),
    ):
        with pytest.raises(InputError, match=r"values has 8 rows of the layout's 16.*shift the whole pack"):
            look_ahead(torch.arange(8), layout, 1)


# Layers


def test_names_and_places():
    names = {name for name, _ in Decoder(config()).named_parameters()}
    own = {n.removeprefix("model.layers.3.") for n in names if n.startswith("model.layers.3.")}
    plain = {n.removeprefix("model.layers.1.") for n in names if n.startswith("model.layers.1.")}
    assert own - plain == {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"}
    assert not plain - own
    assert {n.split(".")[2] for n in names if ".layers." in n} == {"0", "1", "2", "3", "4"}
    once = Decoder(config(mtp=repeated()))
    assert [layer.self_attn.layer_index for layer in once.model.layers] == [0, 1, 2]
    assert len(Decoder(config(mtp=MTPConfig())).model.layers) == LAYERS


def test_a_stage_of_mtp_alone_has_the_layers_of_the_whole_model():
    """Built from the model's pattern: DSA, though that stage holds no decoder layer; dense where the last one is."""
    settings = config(layer_types=("dense", "dsa"))
    alone = decoder_layers(settings)[LAYERS:]
    assert all(isinstance(layer, MTPLayer) and layer.self_attn.indexer is not None for layer in alone)
    assert [layer.self_attn.layer_index for layer in alone] == [2, 3, 4]
    dense = decoder_layers(config(layer_types=("dsa", "dense")))[LAYERS:]
    assert [layer.self_attn.role for layer in dense] == ["dense"] * 3
    sharing = decoder_layers(config(dsa={"share_every": 2}))
    assert [layer.self_attn.role for layer in sharing] == ["selects", "shares", "selects", "shares", "selects"]


def test_a_seed_gives_the_same_backbone_with_and_without():
    weights = []
    for mtp in (MTPConfig(), MTPConfig(depths=2), repeated(depths=2)):
        model = Decoder(config(mtp=mtp))
        model.reset_parameters(torch.Generator().manual_seed(7))
        weights.append(model.state_dict())
    for other in weights[1:]:
        assert all(torch.equal(value, other[name]) for name, value in weights[0].items() if "indexer" not in name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_depth_by_hand(kind):
    model = made(config(KINDS[kind], MTPConfig(depths=2)))
    tokens, _ = batch()
    out = model(tokens, LAYOUT, Pass(mode="dense"))
    ahead = look_ahead(tokens, LAYOUT, 2)
    hidden = out.hidden

    def normed(x, norm):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight

    for depth, layer in enumerate(model.model.layers[LAYERS:]):
        embedded = model.model.embed_tokens.weight[ahead[depth].clamp(min=0)] * (ahead[depth] >= 0)[:, None]
        x = torch.cat((normed(embedded, layer.enorm), normed(hidden, layer.hnorm)), -1) @ layer.eh_proj.weight.T
        x = x + layer.self_attn(normed(x, layer.input_layernorm), LAYOUT, Pass(mode="dense")).hidden
        x = x + layer.mlp(normed(x, layer.post_attention_layernorm))
        hidden = normed(x, layer.shared_head["norm"])
        assert_close(out.ahead[depth], hidden)
    assert torch.equal(out.ahead[1][~LAYOUT.real_rows], torch.zeros(5, 16).double())


# Documents


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("components", [(), BOTH[1:]], ids=str)
@pytest.mark.parametrize("mode", ["dense", "warmup", "sparse"])
def test_packed_documents_equal_each_alone(kind, components, mode):
    """Documents shorter than the depths, of one token and of none among them."""
    model = made(config(KINDS[kind], repeated(*components)))
    tokens, labels = batch()
    run = Pass(mode=mode, kl_divisor=23)
    out = model(tokens, LAYOUT, run)
    loss_of(model, out, labels).backward()
    packed = gradients(model)
    model.zero_grad()
    for first, length in ((0, 9), (10, 1), (12, 2), (15, 11)):
        rows = slice(first, first + length)
        layout = Layout.causal(length)
        alone = model(tokens[rows], layout, run)
        for ours, theirs in zip(out.ahead, alone.ahead, strict=True):
            assert_close(ours[rows], theirs)
        loss_of(model, alone, labels[rows], layout).backward()
    whole = gradients(model)
    assert packed.keys() == whole.keys()
    for name, gradient in whole.items():
        assert_close(packed[name], gradient)


def test_a_shift_across_documents_is_seen():
    """Negative control: with the next document's first token at a document's end, the loss there is another."""
    model, (tokens, labels) = made(config()), batch()
    right = model(tokens, LAYOUT)
    crossing = torch.stack([tokens.clamp(min=0).roll(-depth) for depth in (1, 2, 3)])
    wrong = model(tokens, LAYOUT, tokens_ahead=crossing)
    last = (LAYOUT.positions == 8).nonzero()[0].item()
    assert (right.ahead[0] - wrong.ahead[0])[last].abs().max() > 1e-3
    assert_close(right.ahead[0][: last - 2], wrong.ahead[0][: last - 2])
    assert (look_ahead(labels, LAYOUT, 3)[0] != labels.roll(-1)).any()


def test_rows_with_a_label_never_read_what_lies_behind_their_document():
    """What ends of documents read instead of a token that is not there changes no row that has a label."""
    model, (tokens, labels) = made(config()), batch()
    ahead, behind = look_ahead(tokens, LAYOUT, 3), look_ahead(labels, LAYOUT, 3)
    poisoned = torch.where((ahead < 0) & LAYOUT.real_rows, 17, ahead)
    clean, changed = model(tokens, LAYOUT), model(tokens, LAYOUT, tokens_ahead=poisoned)
    for depth in range(3):
        labelled = behind[depth] >= 0
        assert labelled.any()
        assert_close(clean.ahead[depth][labelled], changed.ahead[depth][labelled])
        assert not torch.equal(clean.ahead[depth], changed.ahead[depth])


def test_losses_are_cross_entropies_of_later_tokens_over_one_divisor():
    model, (tokens, labels) = made(config()), batch()
    labels[4] = IGNORED_LABEL  # a masked label stays masked, for whoever would have predicted it
    out = model(tokens, LAYOUT)
    for divisor in (None, 7, torch.tensor(7)):
        got = model.mtp_losses(out.ahead, labels, LAYOUT, divisor)
        count = (labels >= 0).sum() if divisor is None else 7
        for depth in (1, 2, 3):
            wanted = 0.0
            for row in range(len(tokens) - depth):
                same = LAYOUT.real_rows[row] and LAYOUT.positions[row + depth] == LAYOUT.positions[row] + depth
                if same and LAYOUT.real_rows[row + depth] and labels[row + depth] >= 0:
                    wanted += F.cross_entropy(model.logits(out.ahead[depth - 1][row]), labels[row + depth])
            torch.testing.assert_close(got[depth - 1].double(), wanted / count, rtol=1e-6, atol=1e-7)
    alone = model.mtp_losses(out.ahead, labels, LAYOUT, labels_ahead=look_ahead(labels, LAYOUT, 3))
    assert torch.equal(alone, model.mtp_losses(out.ahead, labels, LAYOUT))


# Repeated layers, unrolled


def unrolled(model: Decoder, depths: int) -> Decoder:
    """The same model with a copy of the repeated layer for each depth."""
    apart = made(config(model.config.attention, MTPConfig(depths=depths)))
    weights = model.state_dict()
    for depth in range(depths):
        for name, value in model.model.layers[LAYERS].state_dict().items():
            weights[f"model.layers.{LAYERS + depth}.{name}"] = value.clone()
    apart.load_state_dict(weights)
    return apart


def summed_over_depths(apart: dict[str, torch.Tensor], depths: int) -> dict[str, torch.Tensor]:
    total: dict[str, torch.Tensor] = {}
    for name, gradient in apart.items():
        for depth in range(1, depths):
            name = name.replace(f".layers.{LAYERS + depth}.", f".layers.{LAYERS}.")
        total[name] = total.get(name, 0) + gradient
    return total


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["dense", "warmup", "sparse", "frozen"])
def test_a_repeated_layer_is_its_copies(kind, mode):
    model, (tokens, labels) = made(config(KINDS[kind], repeated())), batch()
    apart = unrolled(model, 3)
    outs = [one(tokens, LAYOUT, Pass(mode=mode)) for one in (model, apart)]
    for one, out in zip((model, apart), outs, strict=True):
        loss_of(one, out, labels).backward()
    assert [list(out.kl) for out in outs] == [[0, 1, 2, 3, 4] if mode in ("warmup", "sparse") else []] * 2
    for ours, theirs in zip(outs[0].ahead, outs[1].ahead, strict=True):
        assert torch.equal(ours, theirs)
    assert outs[0].selections.keys() == outs[1].selections.keys()
    ours, theirs = gradients(model), summed_over_depths(gradients(apart), 3)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert_close(ours[name], gradient)


class Textbook:
    """The decoder trusted; every depth of a repeated MLA layer written out, heads expanded, by masks [T, S].

    Each depth has a copy of the layer, so that gradients tell who used which weight.
    """

    def __init__(self, model: Decoder, out: DecoderOutput, tokens: torch.Tensor, mode: str):
        self.copies = [copy.deepcopy(model.model.layers[LAYERS]) for _ in range(model.config.mtp.depths)]
        for layer in self.copies:
            layer.zero_grad()
        self.mode, self.shares = mode, model.config.mtp.shares
        self.ahead, hidden, first = [], out.hidden, None
        for depth, layer in enumerate(self.copies):
            at = look_ahead(tokens, LAYOUT, depth + 1)[depth]
            embedded = model.model.embed_tokens.weight[at.clamp(min=0)] * (at >= 0)[:, None]
            joined = layer.eh_proj(torch.cat((layer.enorm(embedded), layer.hnorm(hidden)), -1))
            x = layer.input_layernorm(joined)
            latents = self.latents(layer, x) if first is None or not self.shares("latent_kv") else first
            first = latents if first is None else first
            chosen = out.selections.get(LAYERS if self.shares("sparse_attention_index") else LAYERS + depth)
            allowed = LAYOUT.keys.mask(len(x)) if mode == "dense" else chosen.mask(len(x))
            joined = joined + self.attend(layer, x, latents, allowed)
            joined = joined + layer.mlp(layer.post_attention_layernorm(joined))
            hidden = layer.shared_head["norm"](joined)
            self.ahead.append(hidden)

    def latents(self, layer, x):
        latent, rope = layer.self_attn.kv_a_proj_with_mqa(x).split([8, 4], -1)
        table = rotary_table(LAYOUT.positions, MLA.rope, 4, dtype=x.dtype)
        return layer.self_attn.kv_a_layernorm(latent), rotate(rope, table, interleaved=True)

    def attend(self, layer, x, latents, allowed):
        attn, (latent, rope) = layer.self_attn, latents
        table = rotary_table(LAYOUT.positions, MLA.rope, 4, dtype=x.dtype)
        q = attn.q_b_proj(attn.q_a_layernorm(attn.q_a_proj(x))).unflatten(-1, (2, 12))
        q_nope, q_rope = q[..., :8], rotate(q[..., 8:].contiguous(), table, interleaved=True)
        k_nope, v = (latent @ attn.kv_b_proj.weight.T).unflatten(-1, (2, 14)).split([8, 6], -1)
        logits = torch.einsum("thn,shn->hts", q_nope, k_nope) + torch.einsum("thr,sr->hts", q_rope, rope)
        logits = (logits / math.sqrt(12)).masked_fill(~allowed, -torch.inf)
        sinks = attn.sinks[:, None, None].expand(2, len(x), 1)
        weights = torch.cat((logits, sinks), -1).softmax(-1)[..., :-1]
        return attn.o_proj(torch.einsum("hts,shv->thv", weights, v).flatten(1))


@pytest.mark.parametrize("components", COMPONENTS, ids=str)
@pytest.mark.parametrize("mode", ["dense", "sparse"])
def test_shared_components_equal_the_unrolled_textbook(components, mode):
    """Every depth's gradient reaches the weights of the first depth's keys, and those of nobody else's."""
    model, (tokens, labels) = made(config(mtp=repeated(*components))), batch()
    out = model(tokens, LAYOUT, Pass(mode=mode, with_kl=False))
    book = Textbook(model, out, tokens, mode)
    for ours, theirs in zip(out.ahead, book.ahead, strict=True):
        assert_close(ours, theirs)
    layer, backbone = model.model.layers[LAYERS], [model.model.embed_tokens.weight, *model.model.layers[1].parameters()]
    names = [name for name, _ in layer.named_parameters() if "indexer" not in name]
    weights = [dict(layer.named_parameters())[name] for name in names]
    got = torch.autograd.grad(
        model.mtp_losses(out.ahead, labels, LAYOUT).sum(), weights + backbone, retain_graph=True, allow_unused=True
    )
    copies = [[dict(one.named_parameters())[name] for name in names] for one in book.copies]
    losses = model.mtp_losses(book.ahead, labels, LAYOUT).sum()
    wanted = torch.autograd.grad(losses, [*itertools.chain(*copies), *backbone], allow_unused=True)
    per_depth = [dict(zip(names, wanted[depth * len(names) :], strict=False)) for depth in range(3)]
    for number, name in enumerate(names):
        parts = [part for one in per_depth if (part := one[name]) is not None]
        assert_close(got[number], sum(parts))
    ours_backbone, theirs_backbone = got[len(names) :], wanted[3 * len(names) :]
    for ours, theirs in zip(ours_backbone, theirs_backbone, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert_close(ours, theirs)
    used = [one["self_attn.kv_a_proj_with_mqa.weight"] is not None for one in per_depth]
    assert used == ([True, False, False] if "latent_kv" in components else [True] * 3)


def test_a_detached_latent_would_be_seen():
    """Negative control: without the later depths' share the gradient of the first depth's keys is another."""
    model, (tokens, labels) = made(config(mtp=repeated("latent_kv"))), batch()
    weight = model.model.layers[LAYERS].self_attn.kv_a_proj_with_mqa.weight
    out = model(tokens, LAYOUT)
    losses = model.mtp_losses(out.ahead, labels, LAYOUT)
    every = torch.autograd.grad(losses.sum(), weight, retain_graph=True)[0]
    first = torch.autograd.grad(losses[0], weight)[0]
    assert (every - first).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("kind", "components"), [*(("mla", one) for one in COMPONENTS), ("gqa", ()), ("gqa", BOTH[1:])], ids=str
)
@pytest.mark.parametrize("mode", ["dense", "warmup", "sparse", "frozen"])
def test_consumers_run_neither_what_is_shared_nor_its_loss(kind, components, mode):
    model, (tokens, _) = made(config(KINDS[kind], repeated(*components))), batch()
    attn, calls = model.model.layers[LAYERS].self_attn, {"kv": 0, "indexer": 0}
    kv = attn.kv_a_proj_with_mqa if kind == "mla" else attn.k_proj
    for name, module in (("kv", kv), ("indexer", attn.indexer)):
        module.register_forward_hook(lambda *_, name=name: calls.__setitem__(name, calls[name] + 1))
    seen = []
    run = Pass(mode=mode, probe=lambda index, what: seen.append((index, what.selection)))
    out = model(tokens, LAYOUT, run)
    once = "sparse_attention_index" in components
    runs = {"dense": 0, "warmup": 1, "sparse": 1, "frozen": 1}[mode]
    assert calls == {"kv": 1 if "latent_kv" in components else 3, "indexer": runs * (1 if once else 3)}
    depths = [LAYERS] if once else [LAYERS, LAYERS + 1, LAYERS + 2]
    assert list(out.kl) == ([0, 1, *depths] if mode in ("warmup", "sparse") else [])
    assert list(out.selections) == ([0, 1, *depths] if mode in ("sparse", "frozen") else [])
    assert [index for index, _ in seen] == [0, 1, *[LAYERS] * len(depths)]


def test_components_are_independent():
    """Each alone changes what it names: later depths' keys, or later depths' selection."""
    model, (tokens, _) = made(config(mtp=repeated())), batch()
    outs = {}
    for components in COMPONENTS:
        one = made(config(mtp=repeated(*components)))
        one.load_state_dict(model.state_dict())
        outs[components] = one(tokens, LAYOUT)
    for a, b in itertools.combinations(COMPONENTS, 2):
        assert torch.equal(outs[a].ahead[0], outs[b].ahead[0])
        assert (outs[a].ahead[2] - outs[b].ahead[2]).abs().max() > 1e-3


def test_the_source_may_share_a_decoder_layers_selection():
    """Layer 3 of a schedule with two shared layers behind each that selects: the MTP layer owns no indexer."""
    settings = config(dsa={"share_every": 3}, mtp=repeated("sparse_attention_index"))
    model, (tokens, _) = made(settings), batch()
    assert settings.selection_sources == (0, 0, 0)
    seen = []
    out = model(tokens, LAYOUT, Pass(probe=lambda index, what: seen.append(what.selection)))
    assert list(out.selections) == list(out.kl) == [0]
    assert all(selection is out.selections[0] for selection in seen)
    apart = made(config(dsa={"share_every": 3}, mtp=MTPConfig(depths=3)))(tokens, LAYOUT)
    assert list(apart.selections) == list(apart.kl) == [0, 3]


def test_the_indexers_loss_meets_the_backbone_nowhere():
    model, (tokens, labels) = made(config(mtp=repeated(*BOTH))), batch()
    learned = {}
    for what in ("lm", "mtp", "kl"):
        model.zero_grad()
        out = model(tokens, LAYOUT)
        losses = {"lm": model.lm_loss(out.hidden, labels), "kl": out.kl_sum}
        losses["mtp"] = model.mtp_losses(out.ahead, labels, LAYOUT).sum()
        losses[what].backward()
        learned[what] = set(gradients(model))
    names = {name for name, _ in model.named_parameters()}
    indexers, own = {n for n in names if ".indexer." in n}, {n for n in names if f".layers.{LAYERS}." in n}
    assert learned["kl"] == indexers
    assert learned["lm"] == names - indexers - own
    assert learned["mtp"] == names - indexers


# When it runs


def test_it_runs_in_training_or_when_asked_for():
    model, (tokens, _) = made(config()), batch()
    assert len(model(tokens, LAYOUT).ahead) == 3
    assert model(tokens, LAYOUT, Pass(with_mtp=False)).ahead == ()
    model.eval()
    plain = model(tokens, LAYOUT)
    assert plain.ahead == ()
    asked = model(tokens, LAYOUT, Pass(with_mtp=True))
    assert len(asked.ahead) == 3
    assert torch.equal(asked.hidden, plain.hidden)
    given = model(tokens, LAYOUT, Pass(with_mtp=True), tokens_ahead=look_ahead(tokens, LAYOUT, 3))
    assert all(torch.equal(a, b) for a, b in zip(asked.ahead, given.ahead, strict=True))


def test_decoding_has_no_tokens_ahead():
    model = made(config())
    out = model(torch.zeros(3, dtype=torch.long), Layout.continuation(0, 3), caches=model.empty_caches())
    assert out.ahead == ()
    with pytest.raises(InputError, match="with_mtp=True asks for tokens ahead, but decoding with caches knows none"):
        model(
            torch.zeros(3, dtype=torch.long),
            Layout.continuation(0, 3),
            Pass(with_mtp=True),
            caches=model.empty_caches(),
        )


def test_inputs_that_do_not_fit_are_errors():
    model, (tokens, labels) = made(config()), batch()
    with pytest.raises(InputError, match=r"tokens_ahead must be \[3, 28\], got \[2, 28\]"):
        model(tokens, LAYOUT, tokens_ahead=look_ahead(tokens, LAYOUT, 2))
    out = model(tokens, LAYOUT)
    with pytest.raises(InputError, match=r"labels_ahead must be \[3, 28\], got \[3, 27\]"):
        model.mtp_losses(out.ahead, labels, LAYOUT, labels_ahead=look_ahead(labels, LAYOUT, 3)[:, 1:])
    with pytest.raises(InputError, match=r"with_mtp=True .* the model has mtp.depths=0"):
        made(config(mtp=MTPConfig()))(tokens, LAYOUT, Pass(with_mtp=True))


def test_compiles_into_one_graph():
    model, (tokens, _) = made(config(mtp=repeated(*BOTH, depths=2), num_layers=1)), batch()

    def step(tokens):
        out = model(tokens, LAYOUT)
        return *out.ahead, out.kl_sum

    eager, compiled = step(tokens), torch.compile(step, fullgraph=True, backend="eager")(tokens)
    for ours, theirs in zip(compiled, eager, strict=True):
        assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
