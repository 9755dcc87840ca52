"""Attention layers that read like the papers: `mla.py` is the place to start."""

from dsattn.nn.gqa import GQASelfAttention
from dsattn.nn.indexer import LightningIndexer
from dsattn.nn.mla import MLASelfAttention

__all__ = ["GQASelfAttention", "LightningIndexer", "MLASelfAttention"]
