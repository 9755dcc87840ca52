"""Tiny random models of every family: the same logits and selections here and there, and every bit back."""

import dataclasses
import hashlib
import json
import shutil
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsattn import Layout
from dsattn.config import MTPConfig
from dsattn.errors import CheckpointError, InputError
from dsattn.integrations import checkpoints
from dsattn.integrations.checkpoints import ConvertOptions, convert
from dsattn.integrations.sources import open_checkpoint
from dsattn.integrations.stored import Stored, digests, open_safetensors
from dsattn.model import Decoder
from dsattn.nn.state import Pass
from dsattn.training import checkpoint
from dsattn.training.runs import load_run

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

ROWS, VOCAB = 40, 97
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.8,
    "mscale_all_dim": 1.0,
}
PLAIN = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "rope_parameters": ROPE,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 3,
}
MLA = {
    **PLAIN,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
# With few ReLU heads many keys score exactly 0.0, and torch.topk breaks such ties as it likes.
INDEXER = {"index_topk": 8, "index_head_dim": 32, "index_n_heads": 32, "first_k_dense_replace": 1}
SHARED = ["full", "full", "shared", "shared"]
CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v32": {**MLA, **INDEXER, "rope_parameters": YARN, "n_group": 2},
    "glm_moe_dsa": {**MLA, **INDEXER, "num_hidden_layers": 4, "indexer_types": SHARED},
    "deepseek_v3": {**MLA, "first_k_dense_replace": 1, "rope_interleave": False, "rope_parameters": YARN},
    "glm4_moe_lite": {**MLA, "q_lora_rank": None},
    "llama": {**PLAIN, "num_key_value_heads": 2, "tie_word_embeddings": True, "rope_parameters": YARN},
    "qwen3": {
        **PLAIN,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 2,
    },
}
SPARSE = ("deepseek_v32", "glm_moe_dsa")
DENSE = tuple(name for name in CONFIGS if name not in SPARSE)


@pytest.fixture(autouse=True)
def _quiet():
    """transformers shows progress and advises on stderr."""
    transformers.utils.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="transformers")
        yield


def tiny_model(family: str, **fields: Any) -> Any:
    """A random causal language model: no norm is the identity and no bias zero, which would hide what is not read."""
    config = transformers.AutoConfig.for_model(family, **{**CONFIGS[family], **fields})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator)
            if tensor.dim() > 1:
                tensor.copy_(noise * tensor.shape[-1] ** -0.5)
            else:
                tensor.add_(noise * (0.1 if name.endswith("norm.weight") else 0.3))
    return model.eval()


def save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"made": "up"}')
    return folder


def load(folder: Path) -> Any:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype="auto")
    assert not any(info.values()), info
    return model.eval()


def assert_same_weights(one: Any, other: Any) -> None:
    left, right = one.state_dict(), other.state_dict()
    assert left.keys() == right.keys()
    assert not [name for name in left if left[name].dtype != right[name].dtype or not left[name].equal(right[name])]


@torch.no_grad()
def compare(model: Any, run: Path, mode: str, rows: int = ROWS) -> None:
    """Logits within 1e-4, in fp32; selections equal where the indexers choose."""
    decoder, _ = load_run(run, "cpu")
    ids = torch.randint(0, VOCAB, (rows,), generator=torch.Generator().manual_seed(1))
    chosen: dict[int, Tensor] = {}

    def keep(layer: int) -> Callable[..., None]:
        return lambda _, __, out: chosen.__setitem__(layer, out[0])

    hooks = [
        layer.self_attn.indexer.register_forward_hook(keep(index))
        for index, layer in enumerate(model.model.layers)
        if getattr(layer.self_attn, "indexer", None) is not None
    ]
    wanted = model(ids[None], use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    out = decoder(ids, Layout.causal(rows), Pass(mode=mode, with_kl=False, with_mtp=False))  # type: ignore[arg-type]
    torch.testing.assert_close(decoder.logits(out.hidden), wanted, atol=1e-4, rtol=0)
    assert out.selections.keys() == (chosen.keys() if mode == "sparse" else set())
    for layer, selection in out.selections.items():
        for row, (ours, theirs) in enumerate(zip(selection.index.tolist(), chosen[layer].tolist(), strict=True)):
            assert {key for key in ours if key >= 0} == {key for key in theirs if key <= row}, (layer, row)


@pytest.mark.parametrize("family", SPARSE)
def test_sparse_family_there_and_back(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    hf = save(model, tmp_path / "hf")
    done = convert(hf, tmp_path / "run")
    assert not done.fresh
    compare(model, tmp_path / "run", "sparse")
    compare(model, tmp_path / "run", "sparse", rows=6)  # fewer rows than keys that are kept
    convert(tmp_path / "run", tmp_path / "back", ConvertOptions(to="hf", like=hf))
    assert_same_weights(load(tmp_path / "back"), model)
    config = json.loads((tmp_path / "back/config.json").read_text())
    assert config["model_type"] == family
    assert config["eos_token_id"] == 3
    assert (tmp_path / "back/tokenizer.json").read_bytes() == (hf / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("family", DENSE)
def test_dense_family_keeps_its_weights(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    hf = save(model, tmp_path / "hf")
    indexer = {"heads": 2, "head_dim": 32, "top_k": 8}
    done = convert(hf, tmp_path / "run", ConvertOptions(indexer=indexer))
    assert done.fresh
    assert all(".indexer." in name for name in done.fresh)
    compare(model, tmp_path / "run", "dense")
    (only,) = checkpoint.list_checkpoints(tmp_path / "run")
    assert checkpoint.load_meta(only)["indexer_steps"] == 0

    own = tmp_path / "run/tokenizer"
    assert load_run(tmp_path / "run", "cpu")[1].data.tokenizer == str(own)
    convert(tmp_path / "run", tmp_path / "copy")
    assert load_run(tmp_path / "copy", "cpu")[1].data.tokenizer == str(tmp_path / "copy/tokenizer")
    assert (tmp_path / "copy/tokenizer/tokenizer.json").read_bytes() == (own / "tokenizer.json").read_bytes()

    convert(hf, tmp_path / "dense", ConvertOptions(dense=True))
    convert(tmp_path / "dense", tmp_path / "back", ConvertOptions(to="hf", like=hf))
    assert_same_weights(load(tmp_path / "back"), model)


def test_dense_checkpoint_becomes_one_of_deepseek_v32(tmp_path: Path) -> None:
    """Straight from folder to folder: transformers loads the result, and with K >= S it is the dense model."""
    model = tiny_model("deepseek_v3", rope_interleave=True)
    done = convert(save(model, tmp_path / "hf"), tmp_path / "dsa", ConvertOptions(to="hf", indexer={"head_dim": 32}))
    made = load(tmp_path / "dsa")
    assert made.config.model_type == "deepseek_v32"
    assert made.config.index_topk == 2048
    ids = torch.arange(ROWS)[None]
    with torch.no_grad():
        torch.testing.assert_close(made(ids).logits, model(ids).logits, atol=1e-4, rtol=0)
    # The indexers have not learned, and what is written says so.
    assert open_checkpoint(tmp_path / "dsa").indexer_steps == 0
    assert set(done.fresh) == made.state_dict().keys() - model.state_dict().keys()
    assert len(done.fresh) == 15


def test_fresh_indexers_are_as_documented(tmp_path: Path) -> None:
    hf = save(tiny_model("glm4_moe_lite", initializer_range=0.05), tmp_path / "hf")
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        convert(hf, tmp_path / name, ConvertOptions(seed=seed, indexer={"heads": 4}))
    a, b, c = ({name: one.read() for name, one in open_checkpoint(tmp_path / x).tensors.items()} for x in "abc")
    drawn = [name for name in a if ".indexer." in name and "k_norm" not in name]
    assert len(drawn) == 9
    assert all(a[name].equal(b[name]) and not a[name].equal(c[name]) for name in drawn)
    assert all(abs(a[name].std().item() - 0.05) < 0.01 for name in drawn)
    assert not a[drawn[0]].equal(a[drawn[3]])
    assert all(a[name].eq(name.endswith("weight")).all() for name in a if "k_norm" in name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_comes_back_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    """The run holds float32, as the trainer wants it; what is written back has the original's dtypes and SHA-256."""
    model = tiny_model("glm_moe_dsa").to(dtype)
    hf = save(model, tmp_path / "hf")
    convert(hf, tmp_path / "run")
    done = convert(tmp_path / "run", tmp_path / "back", ConvertOptions(to="hf", like=hf, digests=True))
    original = open_safetensors(hf)
    assert done.digests == digests(original)
    assert not done.rounded
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    value = model.state_dict()["model.layers.1.mlp.experts.gate_up_proj"][3, 32:].view(torch.uint8)
    assert done.digests[name] == hashlib.sha256(bytes(value.flatten().tolist())).hexdigest()
    assert json.loads((tmp_path / "back/config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")


def test_rounding_is_counted(tmp_path: Path) -> None:
    hf = save(tiny_model("llama"), tmp_path / "hf")
    done = convert(hf, tmp_path / "a", ConvertOptions(to="hf", dense=True, dtype="bfloat16"))
    assert "model.layers.0.mlp.up_proj.weight" in done.rounded
    assert {one.dtype for one in open_safetensors(tmp_path / "a").values()} == {torch.bfloat16}
    assert not convert(tmp_path / "a", tmp_path / "b", ConvertOptions(to="hf", dense=True)).rounded


def test_float8_blocks_are_read_as_the_products_that_they_mean(tmp_path: Path) -> None:
    """As DeepSeek releases V3.2: scales that are powers of two, and an edge that no block fills."""
    model = tiny_model("deepseek_v32", hidden_size=160).to(torch.bfloat16)
    hf = save(model, tmp_path / "hf")
    weights = safetensors.load_file(hf / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"  # [160, 96]
    scales = torch.tensor([[2.0**-7], [2.0**-5]])
    weights[name] = (weights[name].float() / scales.repeat_interleave(128, 0)[:160]).to(torch.float8_e4m3fn)
    weights[f"{name}_scale_inv"] = scales
    meant = torch.cat((weights[name][:128].float() * 2.0**-7, weights[name][128:].float() * 2.0**-5))
    safetensors.save_file(weights, hf / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"down_proj\.weight is torch\.float8_e4m3fn") as error:
        convert(hf, tmp_path / "run")
    assert "down_proj.weight_scale_inv belongs to nothing" in str(error.value)

    fields = json.loads((hf / "config.json").read_text())
    fields["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (hf / "config.json").write_text(json.dumps(fields))
    convert(hf, tmp_path / "run")
    assert open_checkpoint(tmp_path / "run").tensors[name].read().equal(meant)
    done = convert(tmp_path / "run", tmp_path / "back", ConvertOptions(to="hf", like=hf))
    assert not done.rounded
    back = open_safetensors(tmp_path / "back")
    assert {one.dtype for one in back.values()} == {torch.bfloat16}
    assert back[name].read().float().equal(meant)
    assert "quantization_config" not in json.loads((tmp_path / "back/config.json").read_text())


def with_mtp(tmp_path: Path) -> tuple[Path, Path]:
    """(a Hugging Face folder with a layer of multi-token prediction as the hub's have it, the run it was made from)."""
    convert(save(tiny_model("glm_moe_dsa"), tmp_path / "plain"), tmp_path / "first")
    config = open_checkpoint(tmp_path / "first").config
    run_config = load_run(tmp_path / "first", "cpu")[1]
    config = dataclasses.replace(config, mtp=MTPConfig(depths=1))
    meta = {"config": dataclasses.asdict(dataclasses.replace(run_config, model=config)), "indexer_steps": 7, "stage": 0}
    torch.manual_seed(3)
    checkpoint.save(tmp_path / "run", 5, {"model": Decoder(config).state_dict()}, keep=1, meta=meta)
    convert(tmp_path / "run", tmp_path / "hf", ConvertOptions(to="hf"))
    return tmp_path / "hf", tmp_path / "run"


def test_mtp_layers_are_kept_with_their_indexers(tmp_path: Path) -> None:
    hf, run = with_mtp(tmp_path)
    names = open_safetensors(hf).keys()
    own = {name.removeprefix("model.layers.4.") for name in names if name.startswith("model.layers.4.")}
    assert {"eh_proj.weight", "embed_tokens.weight", "shared_head.head.weight", "shared_head.norm.weight"} <= own
    assert {"self_attn.indexer.wk.weight", "self_attn.indexer.k_norm.bias", "mlp.experts.0.up_proj.weight"} <= own
    assert json.loads((hf / "config.json").read_text())["num_nextn_predict_layers"] == 1
    convert(hf, tmp_path / "again")
    assert digests(open_checkpoint(tmp_path / "again").tensors) == digests(open_checkpoint(run).tensors)
    assert open_checkpoint(tmp_path / "again").indexer_steps == 7


def test_mtp_copy_that_differs_is_an_error(tmp_path: Path) -> None:
    hf, _ = with_mtp(tmp_path)
    weights = safetensors.load_file(hf / "model.safetensors")
    weights["model.layers.4.embed_tokens.weight"][0, 0] += 1
    safetensors.save_file(weights, hf / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.4\.embed_tokens\.weight differs from model\.embed_tokens"):
        convert(hf, tmp_path / "again")


def test_mtp_layers_that_transformers_dropped_are_noted(tmp_path: Path) -> None:
    hf = save(tiny_model("deepseek_v32", num_nextn_predict_layers=1), tmp_path / "hf")
    done = convert(hf, tmp_path / "run")
    assert done.config.mtp.depths == 0
    assert "names 1 MTP layer(s)" in done.notes[0]


def test_every_misfit_is_listed_at_once(tmp_path: Path) -> None:
    hf = save(tiny_model("deepseek_v32"), tmp_path / "hf")
    weights = safetensors.load_file(hf / "model.safetensors")
    del weights["model.layers.0.self_attn.indexer.wk.weight"], weights["model.layers.2.mlp.experts.1.up_proj.weight"]
    weights["model.norm.weight"] = weights["model.norm.weight"][:5].clone()
    weights["model.layers.1.strange"] = torch.zeros(2)
    weights["model.layers.1.self_attn.o_proj.weight"] = torch.zeros(64, 64).to(torch.float8_e4m3fn)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)  # of old checkpoints: nothing reads it
    safetensors.save_file(weights, hf / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="5 problem") as error:
        convert(hf, tmp_path / "run")
    text = str(error.value)
    assert "model.layers.0.self_attn.indexer.wk.weight is missing" in text
    assert "model.layers.2.mlp.experts.1.up_proj.weight is missing" in text
    assert "model.norm.weight is [5], must be [64]" in text
    assert "model.layers.1.strange belongs to nothing" in text
    assert "o_proj.weight is torch.float8_e4m3fn, must be" in text
    assert not (tmp_path / "run").exists()


def test_a_trained_indexer_is_not_replaced(tmp_path: Path) -> None:
    hf = save(tiny_model("deepseek_v32"), tmp_path / "hf")
    for options in (ConvertOptions(indexer={"heads": 2}), ConvertOptions(dense=True)):
        with pytest.raises(InputError, match="would throw them away"):
            convert(hf, tmp_path / "run", options)
    with pytest.raises(InputError, match="leave one of the two out"):
        ConvertOptions(dense=True, indexer={"heads": 2})
    convert(hf, tmp_path / "run")
    with pytest.raises(InputError, match="nothing is overwritten"):
        convert(hf, tmp_path / "run")
    (only,) = checkpoint.list_checkpoints(tmp_path / "run")
    assert checkpoint.load_meta(only)["indexer_steps"] == 1  # trained elsewhere: `train.fresh_indexer` refuses it


def test_what_no_family_says_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    hf = save(tiny_model("llama"), tmp_path / "hf")
    with pytest.raises(InputError, match="no family of transformers has an indexer beside grouped-query attention"):
        convert(hf, tmp_path / "out", ConvertOptions(to="hf"))
    hf = save(tiny_model("deepseek_v3"), tmp_path / "halves")
    with pytest.raises(InputError, match="rope_interleaved=False would be read back as True"):
        convert(hf, tmp_path / "out", ConvertOptions(to="hf"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["halves", "hf"]


def test_damage_and_wrong_folders(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither a run of dsattn nor a folder with a config"):
        convert(tmp_path, tmp_path / "out")
    hf = save(tiny_model("llama"), tmp_path / "hf")
    convert(hf, tmp_path / "run", ConvertOptions(dense=True))
    (file,) = (tmp_path / "run").glob("checkpoints/*/*.distcp")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="altered"):
        convert(tmp_path / "run", tmp_path / "out", ConvertOptions(to="hf"))
    for text, why in (("{", "is not JSON"), ('{"hidden_size": 1}', "has no model_type")):
        (hf / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=why):
            convert(hf, tmp_path / "out")


def test_megatron_names_there_and_back(tmp_path: Path) -> None:
    _, run = with_mtp(tmp_path)
    convert(run, tmp_path / "megatron", ConvertOptions(to="megatron", shard_bytes=10**5))
    held = open_safetensors(tmp_path / "megatron")
    assert "decoder.layers.3.mlp.experts.linear_fc1.weight3" in held
    assert "decoder.layers.0.self_attention.core_attention.indexer.linear_wq_b.weight" in held
    convert(tmp_path / "megatron", tmp_path / "again")
    assert digests(open_checkpoint(tmp_path / "again").tensors) == digests(open_checkpoint(run).tensors)


@pytest.mark.parametrize("to", ["dsattn", "hf", "megatron"])
def test_memory_holds_a_shard_and_not_the_model(to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts the bytes of tensors that were read and are still alive, at every read."""
    hf = save(tiny_model("deepseek_v32", num_hidden_layers=8), tmp_path / "hf")
    alive: dict[int, int] = {}
    peak = [0, 0]
    real = checkpoints.open_checkpoint

    def watched(path: Path, **options: Any) -> Any:
        source = real(path, **options)
        for name, one in source.tensors.items():
            source.tensors[name] = Stored(one.shape, one.dtype, lambda one=one: watch(one.read()))
        peak[1] = sum(one.nbytes for one in source.tensors.values())
        return source

    def watch(value: Tensor) -> Tensor:
        value = value.clone()
        alive[id(value)] = value.nbytes
        weakref.finalize(value, alive.pop, id(value))
        peak[0] = max(peak[0], sum(alive.values()))
        return value

    monkeypatch.setattr(checkpoints, "open_checkpoint", watched)
    options = {"shard_bytes": 1} if to != "dsattn" else {}
    convert(hf, tmp_path / "out", ConvertOptions(to=to, **options))  # type: ignore[arg-type]
    largest = max(one.nbytes for one in real(hf).tensors.values())
    assert largest <= peak[0] <= 2 * largest < peak[1] / 4


def test_an_interrupted_conversion_leaves_no_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf = save(tiny_model("llama"), tmp_path / "hf")

    def broken(*_: Any) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "write_safetensors", broken)
        with pytest.raises(OSError, match="No space left"):
            convert(hf, tmp_path / "out", ConvertOptions(to="hf", dense=True))
    assert not (tmp_path / "out").exists()
    convert(hf, tmp_path / "out", ConvertOptions(to="hf", dense=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out"]
    shutil.rmtree(tmp_path / "out")
