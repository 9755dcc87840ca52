"""What is computed and what is kept: counted once, by structure, before anything runs.

work.py: FLOPs and bytes of one operation.   weights.py: layers, weights, parameters.
model.py: the work of a layer and a model.   megatron.py: FLOPs as Megatron Core counts them, for comparison.
memory.py: what a layer keeps for its backward, of the tensors in kept.py.
place.py: what a rank of a parallel run holds.   plan.py: its memory at the fullest moment, with scratch.py's kernels.
traffic.py: what its collectives move.
"""

from dsattn.accounting.megatron import megatron_flops
from dsattn.accounting.memory import layer_memory, model_memory, weight_copies
from dsattn.accounting.model import layer_parts, layer_work, model_parts, model_work
from dsattn.accounting.place import Place, Weights, layer_weights, learning, place
from dsattn.accounting.plan import MemoryPlan, layers_kept, memory_plan
from dsattn.accounting.traffic import Collective, layer_traffic, stage_traffic
from dsattn.accounting.weights import (
    Matrix,
    Role,
    attention_matrices,
    decoder_layers,
    expert_matrices,
    indexer_matrices,
    layer_roles,
    mlp_matrices,
    owning_layers,
    parameter_counts,
)
from dsattn.accounting.work import (
    Direction,
    Part,
    Work,
    attention_work,
    delta_rule_work,
    dense_kv_bytes,
    indexer_kl_work,
    indexer_scores_work,
    kept_pairs,
    linear_work,
    pool_keys_work,
    select_keys_work,
    select_topk_work,
    sparse_kv_bytes,
    visible_pairs,
    visible_pools,
)

__all__ = [
    "Collective",
    "Direction",
    "Matrix",
    "MemoryPlan",
    "Part",
    "Place",
    "Role",
    "Weights",
    "Work",
    "attention_matrices",
    "attention_work",
    "decoder_layers",
    "delta_rule_work",
    "dense_kv_bytes",
    "expert_matrices",
    "indexer_kl_work",
    "indexer_matrices",
    "indexer_scores_work",
    "kept_pairs",
    "layer_memory",
    "layer_parts",
    "layer_roles",
    "layer_traffic",
    "layer_weights",
    "layer_work",
    "layers_kept",
    "learning",
    "linear_work",
    "megatron_flops",
    "memory_plan",
    "mlp_matrices",
    "model_memory",
    "model_parts",
    "model_work",
    "owning_layers",
    "parameter_counts",
    "place",
    "pool_keys_work",
    "select_keys_work",
    "select_topk_work",
    "sparse_kv_bytes",
    "stage_traffic",
    "visible_pairs",
    "visible_pools",
    "weight_copies",
]
