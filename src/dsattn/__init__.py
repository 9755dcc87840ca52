"""DeepSeek Sparse Attention: a lightning indexer scores every visible key, the top-k are kept, attention reads those.

 hidden states h [T, M]
   |-- nn/mla.py latents -----------------> q [T, H, C]   kv [S, C]  ------------------------------+
   |-- nn/indexer.py ---> q_I [T, H_I, D], k_I [S, D], w [T, H_I]                                  |
   |        |  (ops/pool.py: k_I -> pooled keys, when KPool is on)                                 |
   |        v                                                                                      |
   |   ops/select.py   scores in row blocks, never [T, S] whole --> Selection [T, K] --> ops/sparse_mla.py
   |        ^                                 |  (model/decoder.py reuses it in later layers)   out [T, H, V], lse [T, H]
   |        +------ ops/distill.py KL <-------+------------------------(lse, q, kv: target)-----------+
   +-- ops/gate.py ------------------------------------------------------------> gate * V-up(out) --> projection --> h'
 nn/ranks.py: where other ranks hold rows, keys or heads, kv and k_I are gathered before q is made.
 keys.py says, for every query row, which keys it may read. backends/ says who computes each box, and why.

Letters: T local query rows, S keys in global order, H heads, C latent width (512 + 64 rope), V value width (512),
K kept keys, H_I / D indexer heads / width, M model width. Start reading at nn/mla.py.
"""

from dsattn.backends import settings
from dsattn.keys import KeyRange, Layout
from dsattn.plan import explain
from dsattn.selection import Selection

__all__ = ["KeyRange", "Layout", "Selection", "__version__", "explain", "settings"]

__version__ = "0.1.0"
