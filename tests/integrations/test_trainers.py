"""A patched model in other people's training loops: the indexers' loss reaches the optimiser there, and once."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel

from dsattn.errors import InputError
from dsattn.integrations.transformers import patch
from dsattn.parallel.gloo import one_thread_a_group

pytest.importorskip("transformers")

VOCAB, TOKENS, LR = 61, 20, 0.5
QUIET = pytest.mark.filterwarnings("ignore:.*will be removed in v6:FutureWarning")  # peft's own calls


def tiny() -> Any:
    """DeepSeek-V3.2 of one layer: 8 of up to 20 keys kept."""
    from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

    torch.manual_seed(0)
    mla = {"q_lora_rank": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    config = DeepseekV32Config(
        vocab_size=VOCAB,
        hidden_size=24,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        first_k_dense_replace=1,
        index_n_heads=32,
        index_head_dim=16,
        index_topk=8,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        **mla,
    )
    return DeepseekV32ForCausalLM(config).train()


def texts(count: int) -> torch.Tensor:
    return torch.randint(1, VOCAB, (count, TOKENS), generator=torch.Generator().manual_seed(1))


class Text(torch.utils.data.Dataset):
    """Remembers in which order it was read."""

    def __init__(self, ids: torch.Tensor):
        self.ids, self.order = ids, []

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.order.append(index)
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def trained_by_hand(model: Any, ids: torch.Tensor, order: list[int], accumulate: int) -> dict[str, torch.Tensor]:
    """One sample a call, `accumulate` calls a step of SGD, losses divided by the labels of the whole step."""
    for first in range(0, len(order), accumulate):
        samples = [ids[index][None] for index in order[first : first + accumulate]]
        for sample in samples:
            model(sample, labels=sample, num_items_in_batch=torch.tensor(accumulate * (TOKENS - 1))).loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= LR * parameter.grad
        model.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def arguments(folder: Path, **options: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "max_steps": 2,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.0,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        **options,
    }


def sgd(model: Any) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)


def assert_same(trained: Any, expected: dict[str, torch.Tensor]) -> None:
    moved = 0
    start = dict(tiny().named_parameters())
    for name, p in trained.named_parameters():
        assert torch.allclose(p, expected[name], atol=1e-6), name
        moved += ".indexer." in name and not torch.allclose(p, start[name], atol=1e-5)
    assert moved >= 3  # wq_b, wk, weights_proj


def test_transformers_trainer_with_accumulation_and_checkpointing(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    ids, model = texts(4), tiny()
    data = Text(ids)
    options = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}}
    with patch(model, indexer_loss_coeff=3.0):
        arrangements = TrainingArguments(**arguments(tmp_path, **options))
        trainer = Trainer(model=model, args=arrangements, train_dataset=data, optimizers=sgd(model))
        trainer.train()
        logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    by_hand = tiny()
    with patch(by_hand, indexer_loss_coeff=3.0):
        losses = [by_hand(ids[index][None], labels=ids[index][None]).loss.item() for index in data.order[:2]]
        expected = trained_by_hand(by_hand, ids, data.order, accumulate=2)
    assert_same(model, expected)
    assert logged[0] == pytest.approx(sum(losses) / 2, rel=1e-3)


@pytest.mark.filterwarnings("ignore")  # of TRL and its packages
def test_trl_sft(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="TRL is not installed: pip install trl")
    datasets = pytest.importorskip("datasets", reason="TRL needs datasets")
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    ids, model = texts(4), tiny()
    table = datasets.table.InMemoryTable.from_pydict({"input_ids": ids.tolist()})
    data = datasets.Dataset(table, fingerprint="a name spares pickling the table")
    options = {"max_steps": 1, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "bf16": False}
    options |= {"activation_checkpointing": False, "dataset_kwargs": {"skip_prepare_dataset": True}}
    words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCAB)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")
    with patch(model):
        arrangements = trl.SFTConfig(**arguments(tmp_path, **options))
        trainer = trl.SFTTrainer(
            model=model, args=arrangements, train_dataset=data, optimizers=sgd(model), processing_class=tokenizer
        )
        trainer.train()
    whole = tiny()
    with patch(whole):
        whole(ids, labels=ids, num_items_in_batch=torch.tensor(4 * (TOKENS - 1))).loss.backward()
    start = dict(tiny().named_parameters())
    expected = {name: start[name] - LR * p.grad for name, p in whole.named_parameters()}
    assert_same(model, expected)


def test_a_loss_made_without_the_indexers_is_found_out(tmp_path: Path) -> None:
    """Trainer's label smoothing makes the loss from logits; nothing would say that the indexers learn nothing."""
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    model = tiny()
    with patch(model):
        arrangements = TrainingArguments(**arguments(tmp_path, label_smoothing_factor=0.1))
        trainer = Trainer(model=model, args=arrangements, train_dataset=Text(texts(4)), optimizers=sgd(model))
        with pytest.raises(InputError, match=r"loss of the last call was dropped.*add outputs\.indexer_loss"):
            trainer.train()
        model.zero_grad()
        for _ in range(2):  # added by hand, it is not missed
            out = model(texts(1))
            (out.logits.square().mean() + out.indexer_loss).backward()


@QUIET
def test_lora_on_the_backbone_and_indexers_in_full(tmp_path: Path) -> None:
    """The adapters and every weight of the indexers move, nothing else; what is saved holds both."""
    peft = pytest.importorskip("peft")
    from safetensors.torch import load_file

    config = {"target_modules": ["q_b_proj", "kv_b_proj", "o_proj"], "r": 2, "init_lora_weights": False}
    model = peft.get_peft_model(tiny(), peft.LoraConfig(**config, modules_to_save=["indexer"]))
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    ids = texts(2)
    with patch(model) as patched:
        optimizer, _ = sgd(model)
        model(input_ids=ids, labels=ids).loss.backward()
        assert all((p.grad is not None) == p.requires_grad for p in model.parameters())  # DDP would wait for the others
        optimizer.step()
    indexer = sum(p.numel() for name, p in tiny().named_parameters() if ".indexer." in name)
    assert patched.trainable[0] == indexer
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, start[name])}
    assert all("lora_" in name or ".indexer.modules_to_save.default." in name for name in moved)
    for part in ("q_b_proj.lora_A", "kv_b_proj.lora_B", "indexer.modules_to_save.default.wk", "default.weights_proj"):
        assert any(part in name for name in moved), part
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.0.self_attn.indexer"
    weight = dict(model.named_parameters())[f"{prefix}.modules_to_save.default.wq_b.weight"]
    assert torch.equal(saved[f"{prefix}.wq_b.weight"], weight)


@one_thread_a_group()
def _rank(rank: int, folder: str) -> None:
    """Half of the batch; DDP's mean of gradients must be the gradient of the whole batch, indexers included."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    try:
        model, ids = tiny(), texts(4)
        with patch(model, mode="sparse"):
            parallel = DistributedDataParallel(model)
            mine = ids[2 * rank : 2 * rank + 2]
            for first in (0, 1):  # the second of two calls reduces the sum of both
                with parallel.no_sync() if first == 0 else torch.enable_grad():
                    (parallel(mine[first][None], labels=mine[first][None]).loss / 2).backward()
            found = {name: p.grad.clone() for name, p in model.named_parameters()}
            model.zero_grad()
            model(ids, labels=ids).loss.backward()
            for name, p in model.named_parameters():
                assert torch.allclose(found[name], p.grad, rtol=1e-4, atol=1e-6), name
        Path(folder, f"rank{rank}").touch()
    finally:
        dist.destroy_process_group()


def test_ddp_on_two_processes(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_rank, args=(str(tmp_path),), nprocs=2)
    assert (tmp_path / "rank0").exists()
    assert (tmp_path / "rank1").exists()
