"""One absorbed self-attention of Megatron's beside ours on a GPU, bf16, at DeepSeek-V3.2's widths: numbers and times.

Skips by backend where Megatron's configuration refuses it, with its reason: TileLang and cuDNN need their packages.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
TOKENS, HIDDEN = 4096, 2048
FIELDS: dict[str, Any] = {
    "bf16": True,
    "params_dtype": torch.bfloat16,
    "hidden_size": HIDDEN,
    "num_attention_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "init_method_std": 0.02,
    "dsa_indexer_n_heads": 64,
    "dsa_indexer_head_dim": 128,
    "dsa_indexer_topk": 1024,
    "dsa_indexer_loss_coeff": 1.0,
    "dsa_indexer_use_sparse_loss": True,
}
OUTPUT_BAR, GRADIENT_BAR, INDEXER_BAR = 1e-3, 3e-3, 1e-2


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """megatron_core.py, with the package imported and one process joined."""
    unpacked = ROOT / ".venv" / "megatron"
    if (unpacked / "megatron" / "core").is_dir():
        sys.path.insert(0, str(unpacked))
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("no megatron-core: unpack its wheel into .venv/megatron")
    sys.path.insert(0, str(HERE))
    import megatron_core

    megatron_core.import_megatron(on_cpu=False)
    megatron_core.world = megatron_core.start(0, 1, str(tmp_path_factory.mktemp("gloo") / "rendezvous"))
    return megatron_core


def distance(a: Tensor, b: Tensor) -> float:
    """1 - 2 a.b / (a.a + b.b): of direction and of size."""
    a, b = a.double().flatten(), b.double().flatten()
    return 1 - (2 * (a @ b) / (a @ a + b @ b)).item()


def step(module: Any, hidden: Tensor, grad: Tensor, micro_batch: Any) -> tuple[Tensor, Tensor]:
    module.zero_grad(set_to_none=True)
    hidden = hidden.clone().requires_grad_()
    out = module(hidden, None, packed_seq_params=micro_batch)[0]
    out.backward(grad)
    return out.detach(), hidden.grad


def milliseconds(module: Any, *arguments: Any) -> float:
    """The fastest of 5 after a warm-up."""
    times = []
    for _ in range(6):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        start.record()
        step(module, *arguments)
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return min(times[1:])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lengths", [[TOKENS], [2500, 96, 1500]], ids=["one document", "packed"])
@pytest.mark.parametrize("backend", ["none", "tilelang", "cudnn"])
def test_a_layer_beside_megatrons_own(core: Any, backend: str, lengths: list[int], record_property: Any) -> None:
    from dsattn.integrations.megatron import Options, with_dsattn

    try:
        config = core.config_of(**FIELDS, dsa_kernel_backend=backend)
    except (ValueError, AssertionError) as error:
        pytest.skip(f"Megatron refuses dsa_kernel_backend={backend}: {error}")
    own = core.config_of(**FIELDS)
    spec = core.attention_spec(own)
    theirs = core.build(spec, config, core.world.groups()).to("cuda", torch.bfloat16).train()
    options = Options(rows="megatron")
    ours = core.build(with_dsattn(spec, own, whole=True, options=options), own, core.world.groups())
    ours = ours.to("cuda", torch.bfloat16).train()
    ours.load_state_dict(theirs.state_dict())
    hidden, grad = (torch.randn(TOKENS, 1, HIDDEN, device="cuda", dtype=torch.bfloat16) for _ in "ab")
    micro_batch = core.packed(lengths)
    for name in ("cu_seqlens_q", "cu_seqlens_kv"):
        setattr(micro_batch, name, getattr(micro_batch, name).cuda())
    found = [step(module, hidden, grad, micro_batch) for module in (theirs, ours)]
    assert distance(found[0][0], found[1][0]) < OUTPUT_BAR
    assert distance(found[0][1], found[1][1]) < GRADIENT_BAR
    worst = 0.0
    for (name, a), b in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        far = distance(a.grad, b.grad)
        assert far < (INDEXER_BAR if "indexer" in name else GRADIENT_BAR), (name, far)
        worst = max(worst, far)
    times = [milliseconds(module, hidden, grad, micro_batch) for module in (theirs, ours)]
    line = f"megatron {backend}, {lengths}: {times[0]:.1f} ms, ours {times[1]:.1f} ms, worst gradient {worst:.1e}"
    record_property("megatron", line)
    sys.stdout.write(line + "\n")
