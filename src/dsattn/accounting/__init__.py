"""What is computed and what is kept: counted once, by structure, before anything runs.

work.py: FLOPs and bytes of one operation.   weights.py: layers, weights, parameters.
model.py: the work of a layer and a model.
memory.py: what a layer keeps for its backward, of the tensors in kept.py.
"""

from dsattn.accounting.memory import layer_memory, model_memory, weight_copies
from dsattn.accounting.model import layer_parts, layer_work, model_parts, model_work
from dsattn.accounting.weights import (
    Matrix,
    Role,
    attention_matrices,
    decoder_layers,
    expert_matrices,
    indexer_matrices,
    layer_roles,
    mlp_matrices,
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
    "Direction",
    "Matrix",
    "Part",
    "Role",
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
    "layer_work",
    "linear_work",
    "mlp_matrices",
    "model_memory",
    "model_parts",
    "model_work",
    "parameter_counts",
    "pool_keys_work",
    "select_keys_work",
    "select_topk_work",
    "sparse_kv_bytes",
    "visible_pairs",
    "visible_pools",
    "weight_copies",
]
