import dataclasses

import pytest
import torch

from dsattn.config import DSAConfig, GQAConfig, IndexerConfig, MLAConfig, ModelConfig, MTPConfig
from dsattn.errors import InputError
from dsattn.keys import Layout
from dsattn.model import Decoder
from dsattn.model.sharing import (
    Sharing,
    sharing_from_hf,
    sharing_from_megatron,
)
from dsattn.nn.state import AttentionOutput, Pass
from dsattn.ops import indexer_scores
from dsattn.selection import Selection

ROWS, TOP_K, VOCAB = 24, 5, 40
MLA = MLAConfig(heads=2, q_lora_rank=12, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
KINDS = {"mla": MLA, "gqa": GQAConfig(heads=4, kv_heads=2, head_dim=8, rope_dim=4)}


def model(kind: str = "mla", **options) -> Decoder:
    """Three layers: the first selects for all. In fp64."""
    source = "hidden" if kind == "gqa" else "q_latent"
    indexer = IndexerConfig(heads=2, head_dim=8, top_k=TOP_K, query_from=source, rope_dim=4)
    dsa = DSAConfig(indexer=indexer, **{"share_every": 3, **options.pop("dsa", {})})
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "num_layers": 3, "intermediate_size": 24, "init_std": 0.3}
    return Decoder(ModelConfig(**{**sizes, "attention": KINDS[kind], "dsa": dsa, **options})).double().train()


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCAB, (ROWS,))


def gradients(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None and p.grad.any()}


@pytest.mark.parametrize(
    ("offset", "every", "layers", "selecting", "sources"),
    [
        (0, 4, 10, (1, 5, 9), {2: 1, 3: 1, 4: 1, 6: 5, 7: 5, 8: 5, 10: 9}),
        (1, 4, 10, (1, 5, 9), {2: 1, 3: 1, 4: 1, 6: 5, 7: 5, 8: 5, 10: 9}),
        (3, 4, 16, (1, 2, 3, 7, 11, 15), {4: 3, 5: 3, 6: 3, 8: 7, 9: 7, 10: 7, 12: 11, 13: 11, 14: 11, 16: 15}),
        (2, 2, 8, (1, 2, 4, 6, 8), {3: 2, 5: 4, 7: 6}),
        (0, 1, 4, (1, 2, 3, 4), {}),
    ],
)
def test_published_patterns(offset, every, layers, selecting, sources):
    dsa = DSAConfig(share_every=every, share_offset=offset)
    found = ModelConfig(num_layers=layers, dsa=dsa).selection_sources  # from 0; the rule counts from 1
    assert [source + 1 for source in found] == [sources.get(layer, layer) for layer in range(1, layers + 1)]
    assert tuple(layer for layer in range(1, layers + 1) if found[layer - 1] == layer - 1) == selecting


def test_dense_layers_are_not_counted():
    types = ("dense", "dsa", "dense", "dsa", "dsa", "dsa", "dense")
    config = ModelConfig(num_layers=7, layer_types=types, dsa=DSAConfig(share_every=2))
    assert config.selection_sources == (None, 1, None, 1, 4, 4, None)
    assert ModelConfig(num_layers=2, layer_types=("dense",) * 2).selection_sources == (None, None)


# What other frameworks call it


def test_hugging_face_and_megatron_count_alike():
    """Hugging Face: max(i - offset + 1, 0) % freq from 0. Megatron: max(L - max(offset, 1), 0) % freq from 1."""
    for freq in (1, 2, 3, 4):
        for offset in (1, 2, 3, 5):
            full = [max(i - offset + 1, 0) % freq == 0 for i in range(20)]
            hf = sharing_from_hf({"index_topk_freq": freq, "index_skip_topk_offset": offset})
            assert hf.pop("share_numbering") == "layers"
            megatron = {"dsa_indexer_topk_freq": freq, "dsa_indexer_skip_topk_offset": offset}
            megatron = sharing_from_megatron(megatron)
            assert megatron.pop("share_numbering") == "dsa"
            assert hf == megatron == {"share_every": freq, "share_offset": offset}
            sources = ModelConfig(num_layers=20, dsa=DSAConfig(**hf)).selection_sources
            assert [source == i for i, source in enumerate(sources)] == full


def test_published_schedules():
    glm = sharing_from_hf({"index_topk_freq": 4, "index_skip_topk_offset": 3})
    sources = ModelConfig(num_layers=78, dsa=DSAConfig(**glm)).selection_sources
    selecting = [i for i, source in enumerate(sources) if source == i]
    assert selecting == [0, 1, 2, *range(6, 75, 4)]
    assert len(selecting) == 21
    named = ["full" if i in selecting else "shared" for i in range(78)]
    for spelled in ({"indexer_types": named}, {"index_topk_pattern": "".join(one[0].upper() for one in named)}):
        options = sharing_from_hf({**spelled, "index_topk_freq": 9})  # the list decides
        assert options == {"indexer_types": tuple(named)}
        assert ModelConfig(num_layers=78, dsa=DSAConfig(**options)).selection_sources == sources
    hunyuan = DSAConfig(**sharing_from_hf({"index_topk_freq": 4}))  # offset 2: 0, 1, 5, 9, ...
    assert [i for i, s in enumerate(ModelConfig(num_layers=12, dsa=hunyuan).selection_sources) if s == i] == [
        0,
        1,
        5,
        9,
    ]


def test_fields_that_are_missing_share_nothing():
    assert DSAConfig(**sharing_from_hf({})).shares is False
    assert sharing_from_megatron({"dsa_indexer_topk_freq": None}) == sharing_from_megatron({})
    assert sharing_from_megatron({"dsa_indexer_topk_freq": 0, "dsa_indexer_skip_topk_offset": None}) == {
        "share_every": 1,
        "share_offset": 0,
        "share_numbering": "dsa",
    }
    hybrid = sharing_from_megatron({"dsa_indexer_topk_freq": 4}, hybrid=True)
    assert ModelConfig(num_layers=4, dsa=DSAConfig(**hybrid)).selection_sources == (0, 0, 2, 2)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"index_topk_freq": 4, "index_skip_topk_offset": 0}, "index_skip_topk_offset=0 with index_topk_freq=4 makes"),
        ({"index_topk_pattern": "SFSF"}, "'SFSF' makes layer 0 share, and nobody is before it"),
        ({"index_topk_pattern": "FXF"}, "'FXF' has 'X' at 1; it must hold full and shared"),
        ({"indexer_types": ["full", "F"]}, "has 'F' at 1; it must hold full and shared"),
    ],
)
def test_schedules_that_cannot_be(fields, says):
    with pytest.raises(InputError, match=says):
        sharing_from_hf(fields)


# What layers hand on


def output(selection: Selection | None = None, kl: float | None = None) -> AttentionOutput:
    value = None if kl is None else torch.tensor(kl)
    return AttentionOutput(torch.zeros(1, 1), selection, value, None, None, ())


def test_selections_go_to_the_layers_of_their_source():
    first, second = (Selection(torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)) for _ in "ab")
    sharing, run = Sharing((0, None, 0, 3, 3)), Pass()
    assert sharing.before(0, run) == (None, run)
    sharing.after(0, output(first, 0.5))
    assert sharing.before(1, run) == (None, run)
    assert sharing.before(2, run)[0] is first
    sharing.after(2, output(first))
    sharing.after(3, output(second, 0.25))
    assert sharing.before(4, run)[0] is second
    assert sharing.selections == {0: first, 3: second}
    assert sharing.kl == {0: torch.tensor(0.5), 3: torch.tensor(0.25)}
    assert Sharing((0, 0)).before(1, run) == (None, run)  # another forward knows nothing of this one


def test_two_micro_batches_in_flight_never_see_each_other():
    """Two forwards, then both backwards: the gradients of one after the other."""
    made = model(dsa={"multi_layer_teacher": True})
    layouts, batches = (Layout.causal(ROWS), Layout.packed([9, 15])), (tokens(), tokens())

    def loss(batch, layout):
        out = made(batch, layout)
        return made.lm_loss(out.hidden, batch) + out.kl_sum

    for batch, layout in zip(batches, layouts, strict=True):
        loss(batch, layout).backward()
    wanted = gradients(made)
    made.zero_grad()
    losses = [loss(batch, layout) for batch, layout in zip(batches, layouts, strict=True)]
    for one in losses:
        one.backward()
    assert all(torch.equal(gradient, wanted[name]) for name, gradient in gradients(made).items())


# The teacher of many layers


def by_hand(made: Decoder, batch: torch.Tensor, layout: Layout, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean over layers of KL(p_l || q), KL(mean of p_l || q)), of whole matrices; q keeps its graph."""
    indexer, seen = [], []
    hook = made.indexers()[0].register_forward_hook(lambda _, __, out: indexer.append(out))
    made(batch, layout, Pass(mode=mode, probe=lambda _, what: seen.append(what)))
    hook.remove()
    mask = layout.keys.mask(ROWS) if seen[0].selection is None else seen[0].selection.mask(ROWS)
    log_q = indexer_scores(*indexer[0], layout.keys).masked_fill(~mask, -torch.inf).log_softmax(-1)
    targets = []
    for what in seen:
        keys = what.kv if what.kv.dim() == 3 else what.kv[:, None]
        keys = keys.repeat_interleave(what.q.shape[1] // keys.shape[1], dim=1)
        logits = (torch.einsum("thd,shd->hts", what.q, keys) * what.scale).masked_fill(~mask, -torch.inf)
        targets.append(logits.softmax(-1).mean(0))

    def kl(p):
        return (torch.xlogy(p, p) - torch.where(mask, p * log_q, 0)).sum() / ROWS

    return torch.stack([kl(p) for p in targets]).mean(), kl(torch.stack(targets).mean(0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["warmup", "sparse"])
def test_the_teacher_is_the_mean_of_the_layers_it_serves(kind, mode):
    made, batch, layout = model(kind, dsa={"multi_layer_teacher": True}), tokens(), Layout.packed([10, 14])
    out = made(batch, layout, Pass(mode=mode))
    mean, of_mean = by_hand(made, batch, layout, mode)
    assert list(out.kl) == [0]
    torch.testing.assert_close(out.kl[0], mean, rtol=1e-8, atol=1e-10)
    weights = list(made.indexers()[0].parameters())
    values = (out.kl_sum, mean, of_mean)
    ours, theirs, same = (torch.autograd.grad(value, weights, retain_graph=True) for value in values)
    for a, b, c in zip(ours, theirs, same, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-10)
        torch.testing.assert_close(a, c, rtol=1e-7, atol=1e-10)
    out = made(batch, layout, Pass(mode=mode))
    out.kl_sum.backward()
    assert set(gradients(made)) == {name for name, _ in made.named_parameters() if ".indexer." in name}


@pytest.mark.parametrize("mode", ["warmup", "sparse"])
def test_without_it_the_selecting_layer_alone_teaches(mode):
    on, off = model(dsa={"multi_layer_teacher": True}), model()
    off.load_state_dict(on.state_dict())
    batch, layout = tokens(), Layout.causal(ROWS)
    outs = [one(batch, layout, Pass(mode=mode)) for one in (on, off)]
    alone = model(dsa={"share_every": 1})
    alone.load_state_dict(on.state_dict(), strict=False)
    torch.testing.assert_close(outs[1].kl[0], alone(batch, layout, Pass(mode=mode)).kl[0])
    assert (outs[0].kl[0] - outs[1].kl[0]).abs() > 1e-3
    assert torch.equal(outs[0].hidden, outs[1].hidden)


def test_mtp_layers_teach_the_indexer_they_use():
    settings = {"dsa": {"share_every": 4, "multi_layer_teacher": True}, "mtp": MTPConfig(depths=1)}
    made, layout, taught = model(**settings), Layout.causal(ROWS), []
    assert made.config.selection_sources == (0, 0, 0, 0)
    batch = tokens()
    for with_mtp in (False, True):
        taught.append(made(batch, layout, Pass(with_mtp=with_mtp)).kl)
    assert [list(kl) for kl in taught] == [[0], [0]]
    assert (taught[0][0] - taught[1][0]).abs() > 1e-6


@pytest.mark.parametrize("mode", ["dense", "frozen"])
def test_no_loss_no_teaching(mode):
    assert model(dsa={"multi_layer_teacher": True})(tokens(), Layout.causal(ROWS), Pass(mode=mode)).kl == {}


def test_decoding_teaches_nothing():
    made = model(dsa={"multi_layer_teacher": True})
    assert list(made(tokens(), Layout.causal(ROWS), caches=made.empty_caches()).kl) == [0]


# The certificate


@pytest.mark.parametrize("kind", KINDS)
def test_results_do_not_depend_on_the_certificate(kind):
    """Also where a live row's scores are all NaN: it selects nothing, whatever was proved of its range."""
    torch.use_deterministic_algorithms(True)
    made, batch = model(kind), tokens()
    nan_row = torch.arange(ROWS)[:, None] == 13
    made.indexers()[0].register_forward_hook(
        lambda _, __, out: out._replace(w=torch.where(nan_row, float("nan"), out.w))
    )
    certified = Layout.causal(ROWS)
    layouts = (
        certified,
        dataclasses.replace(certified, keys=dataclasses.replace(certified.keys, every_row_has_a_key=False)),
    )
    results = []
    for layout, proved in zip(layouts, (True, False), strict=True):
        made.zero_grad()
        seen = []
        out = made(batch, layout, Pass(probe=lambda _, what, seen=seen: seen.append(what.selection)))
        assert [selection.every_row_has_a_key for selection in seen] == [proved] * 3
        assert [selection.length[13].item() for selection in seen] == [0] * 3
        assert seen[0].length[14] == TOP_K
        (made.lm_loss(out.hidden, batch) + out.kl_sum).backward()
        results.append((out.hidden.detach(), out.kl_sum.detach(), gradients(made)))
    assert results[0][0].isfinite().all()
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][2].keys() == results[1][2].keys()
    for name, gradient in results[0][2].items():
        assert gradient.isfinite().all()
        assert torch.equal(gradient, results[1][2][name]), name


def test_a_certificate_that_is_missing_is_false():
    index = torch.zeros(2, 1, dtype=torch.int32)
    assert not Selection(index, torch.ones(2, dtype=torch.int32)).every_row_has_a_key
    assert not Selection.from_index(index).every_row_has_a_key
