"""What is computed: one file an arrow of the picture, each with its formula, checks, autograd and public function.

Reading order: indexer (scores), select (scores to keys), pool (keys that are scored together), sparse_mla, sparse_gqa,
dense, distill (the indexer's loss), dsa (attention and loss in one), gate. The plain-torch references are in gathered,
ranged and distill_reference.
"""

from dsattn.ops.dense import dense_gqa, dense_mla
from dsattn.ops.distill import indexer_kl
from dsattn.ops.dsa import dsa_attention
from dsattn.ops.gate import output_gate
from dsattn.ops.indexer import indexer_scores
from dsattn.ops.pool import expand_pools, pool_keys
from dsattn.ops.select import select_keys, select_topk
from dsattn.ops.sparse_gqa import sparse_gqa
from dsattn.ops.sparse_mla import sparse_mla

__all__ = [
    "dense_gqa",
    "dense_mla",
    "dsa_attention",
    "expand_pools",
    "indexer_kl",
    "indexer_scores",
    "output_gate",
    "pool_keys",
    "select_keys",
    "select_topk",
    "sparse_gqa",
    "sparse_mla",
]
