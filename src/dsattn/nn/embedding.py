"""Token embedding."""

import torch
from torch import Tensor, nn

from dsattn.ops.rows import take_rows


class Embedding(nn.Embedding):
    """torch's, whose gradient repeats bit for bit where determinism is asked for.

    deterministic: None asks `dsattn.settings` and torch's switch, at each call.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, *, deterministic: bool | None = None):
        super().__init__(num_embeddings, embedding_dim)
        self.deterministic = deterministic

    def forward(self, input: Tensor) -> Tensor:
        """[T] int64 -> [T, embedding_dim], under autocast in fp32, whatever weights FSDP2 has gathered.

        All layers add to these rows: in bf16 their sum would depend on the mesh, and on few bits.
        """
        rows = take_rows(self.weight, input, deterministic=self.deterministic)
        if torch.is_autocast_enabled(rows.device.type):
            return rows.to(torch.promote_types(rows.dtype, torch.float32))
        return rows
