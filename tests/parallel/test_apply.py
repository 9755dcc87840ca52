"""One rank, and stages side by side in one process; ranks are in test_agreement.py."""

import torch

from dsattn.config import DSAConfig, IndexerConfig, MLAConfig, ModelConfig, TrainConfig
from dsattn.model.decoder import Decoder
from dsattn.model.stage import DecoderStage, cut
from dsattn.parallel.apply import Stages, apply
from dsattn.parallel.mesh import ParallelMesh

MODEL = ModelConfig(
    hidden_size=16,
    num_layers=4,
    intermediate_size=16,
    attention=MLAConfig(heads=2, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4),
    dsa=DSAConfig(indexer=IndexerConfig(heads=2, head_dim=8, top_k=4, rope_dim=4)),
    tie_embeddings=True,
)


def test_one_rank_gets_the_plain_model() -> None:
    torch.manual_seed(0)
    plain = Decoder(MODEL)
    torch.manual_seed(0)
    prepared: list[Decoder] = []
    whole = apply(MODEL, ParallelMesh(), TrainConfig(), prepared.append)
    assert prepared == [whole.model]
    assert (whole.pipeline, whole.ranks, whole.copies) == (None, None, frozenset())
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), whole.model.parameters(), strict=True))
    assert whole.count_parameters() == sum(one.numel() for one in plain.parameters())


def test_stages_are_one_model_under_its_names() -> None:
    """Two of four chunks, the last with a copy of the embedding."""
    torch.manual_seed(0)
    plain = dict(Decoder(MODEL).named_parameters())
    chunks = cut(MODEL, ("Et", "t", "t", "tL"))
    stages: list[DecoderStage] = []
    for chunk in (chunks[1], chunks[3]):
        torch.manual_seed(0)
        stages.append(DecoderStage(MODEL, chunk))
    both = Stages(stages)
    names = [name for name, _ in both.named_parameters()]
    assert {name.split(".")[2] for name in names if ".layers." in name} == {"1", "3"}
    assert all(torch.equal(one, plain[name]) for name, one in both.named_parameters())
    assert both.copies == {"model.embed_tokens.weight"}
    assert len(both.indexers()) == 2
    state = {name: value + 1 for name, value in both.state_dict().items()}
    both.load_state_dict(state)
    assert all(torch.equal(one, plain[name] + 1) for name, one in both.named_parameters())
    both.reset_indexers()
    changed = {name for name, one in both.named_parameters() if not torch.equal(one, plain[name] + 1)}
    assert changed
    assert all(".indexer." in name for name in changed)
    both.move_routing_biases({}, 0.1)
