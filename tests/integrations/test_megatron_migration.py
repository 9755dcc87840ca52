"""The guide's migration example: Megatron's flags and our command name the same model, and the command trains."""

import dataclasses
import json
import re
from pathlib import Path

from dsattn.cli.__main__ import main
from dsattn.integrations.megatron import from_megatron

GUIDE = Path(__file__).parents[2] / "docs" / "guide.md"
SHORT = {f"--train.stages.{stage}.{name}" for stage in range(3) for name in ("steps=1", "lr-warmup=0")}
STYLE = {"swiglu": True, "qk_layernorm": True, "vocab_size": 259}  # flags without a number
NAMED = {  # what the flags say, by where the configuration has it
    (): ("num_layers", "hidden_size", "intermediate_size"),
    ("attention",): ("heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    ("dsa",): ("share_every",),
    ("dsa", "indexer"): ("heads", "head_dim", "top_k", "rope_dim"),
}


def test_the_command_trains_the_model_of_the_flags(tmp_path: Path) -> None:
    section = GUIDE.read_text(encoding="utf-8").partition("## From Megatron\n")[2]
    flags, command = re.findall(r"^```(?:text|sh)\n(.*?)^```", section, re.DOTALL | re.MULTILINE)[:2]
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("keys that an indexer chose\n" * 500)
    command = command.replace("~/texts", str(tmp_path)).replace("runs/mine", str(tmp_path / "run"))
    options = command.replace("\\\n", " ").split()[1:]
    assert main([*options, *SHORT, "--data.held-out=0.5", "--train.eval-packs=1", "--train.no-tensorboard"]) == 0
    run = json.loads((tmp_path / "run" / "config.json").read_text())
    given = {name.replace("-", "_"): int(value) for name, value in re.findall(r"--([a-z-]+) (\d+)", flags)}
    wanted = dataclasses.asdict(from_megatron(given | STYLE))
    for path, names in NAMED.items():
        ours, theirs = run["model"], wanted
        for name in path:
            ours, theirs = ours[name], theirs[name]
        assert {name: ours[name] for name in names} == {name: theirs[name] for name in names}
    batch = run["data"]["pack_tokens"], run["train"]["packs_per_step"], run["train"]["packs_per_micro_batch"]
    assert batch == (given["seq_length"], given["global_batch_size"], given["micro_batch_size"])
