"""What the forward and backward kernels of sparse MLA on Hopper share: tile sizes, layouts, copies of rows.

Four warps compute a product of 64 rows; tiles are 64 heads by 64 keys.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
V = gl.constexpr(512)
HEADS = gl.constexpr(64)
KEYS = gl.constexpr(64)

# Waits for the threads of one group. Triton 3.7 changed its name.
barrier = getattr(gl, "thread_barrier", None) or gl.barrier


@gluon.constexpr_function
def accumulator(columns):
    """Layout of a [64, columns] product of one group of four warps."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def copies():
    """Layout of [64, 64 n] bf16 tiles that are copied: eight threads a row of 128 bytes."""
    return gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])


@gluon.constexpr_function
def leaving(vector):
    """Layout of a [64, 64] product in register order: `vector` neighbouring columns a thread, no data moved."""
    columns = [1, 2, 16, 32] if vector == 4 else [1, 2, 4, 32]
    registers = [*([0, column] for column in columns), [8, 0]]
    lanes = [[0, vector], [0, 2 * vector], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, 64])


@gluon.jit
def load_index(index, first, count, LAYOUT: gl.constexpr):
    """KEYS slots of a row from `first` on; -1 from `count` on, where nothing is read."""
    slot = first + gl.arange(0, KEYS, layout=LAYOUT)
    return gl.load(index + slot, mask=slot < count, other=-1)


@gluon.jit
def copy_heads(shared, source, heads, FIRST: gl.constexpr, WIDTH: gl.constexpr, TOTAL: gl.constexpr):
    """Start copying channels FIRST .. FIRST + WIDTH of `heads` heads at `source` [H, TOTAL]; the others become 0."""
    LAYOUT: gl.constexpr = copies()
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, LAYOUT))
    channel = FIRST + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    pointers = source + gl.expand_dims(head, 1) * TOTAL + gl.expand_dims(channel, 0)
    async_copy.async_copy_global_to_shared(shared, pointers, mask=gl.expand_dims(head < heads, 1))
