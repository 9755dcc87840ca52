"""What is benchmarked: the shapes of published models, the sizes of a call, and operands for it.

Letters: T query rows, S keys, H heads, G key groups, C latent width, V value width, H_I / D indexer heads / width,
K kept keys.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dsattn.bench.patterns import RECENCY, UNIFORM, Order, Pattern, draw
from dsattn.config import Precision
from dsattn.errors import InputError
from dsattn.keys import KeyRange, Layout
from dsattn.selection import Selection


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The widths of one model family.

    heads, width, value_dim: H, C, V of absorbed MLA. groups, head_dim: G and the head width of GQA, at the same H.
    index_heads, index_width, top_k: H_I, D, K. dense_width, dense_value_dim: of a head of dense MLA, not absorbed.
    """

    heads: int = 64
    width: int = 576
    value_dim: int = 512
    groups: int = 8
    head_dim: int = 128
    index_heads: int = 32
    index_width: int = 128
    top_k: int = 2048
    dense_width: int = 192
    dense_value_dim: int = 128


SHAPES = {
    "glm": Shape(),
    "deepseek": Shape(heads=128, index_heads=64),
    "hunyuan": Shape(heads=32, index_heads=16),
    "small": Shape(
        heads=4,
        width=24,
        value_dim=16,
        groups=2,
        head_dim=16,
        index_heads=4,
        index_width=16,
        top_k=16,
        dense_width=24,
        dense_value_dim=16,
    ),
}
"""GLM-5, DeepSeek-V3.2, Hunyuan V4, and one for laptops. Dense heads are DeepSeek's 192 and 128 throughout."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One benchmark of an operation.

    rows, keys: T and S; row t sees keys 0 .. S - T + t, or those of its range where `given` are ranges. order: of the
    selected keys, see `patterns`; `recorded` replays `pattern`. lengths: rows say how many of their slots are keys;
    without, kernels walk through empty slots too. backend, deterministic, and relu and precision of a selection: as the
    operations take them. copies: sets of operands that timings rotate over.
    """

    shape: Shape
    rows: int
    keys: int
    order: Order = "ascending"
    lengths: bool = True
    pattern: Pattern | None = None
    backend: str = "auto"
    deterministic: bool = False
    given: KeyRange | None = None
    relu: bool = True
    precision: Precision = "bf16"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    copies: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.rows <= self.keys:
            raise InputError(
                f"rows={self.rows} must be between 1 and keys={self.keys}: rows are the last of a sequence"
            )
        if self.shape.top_k < 1:
            raise InputError(f"top_k={self.shape.top_k} must be at least 1")
        if self.order == "recorded" and self.pattern is None:
            raise InputError("order='recorded' needs a pattern; make one with `dsattn bench record RUN`")

    @cached_property
    def ranges(self) -> KeyRange:
        """[T] ranges: those given, else causal ones of the last T rows of one sequence."""
        if self.given is not None:
            return self.given.to(self.device)
        return Layout.continuation(self.keys - self.rows, self.rows).keys.to(self.device)

    @property
    def visible_pairs(self) -> int:
        """Query-key pairs inside the ranges."""
        if self.given is not None:
            return self.ranges.num_pairs()
        return self.rows * self.keys - self.rows * (self.rows - 1) // 2

    def selection(self) -> Selection:
        """Which keys each row selects. Random order, or full lengths, make operands that no Selection would have."""
        patterns = {"recency": RECENCY, "recorded": self.pattern}
        pattern = patterns.get(self.order) or UNIFORM
        shuffled = self.order == "random"
        drawn = draw(pattern, self.ranges, self.keys, self.shape.top_k, shuffled=shuffled)
        return drawn if self.lengths else replace(drawn, length=torch.full_like(drawn.length, drawn.width))

    def normal(self, seed: int) -> Callable[..., Tensor]:
        """Make standard normal tensors of the setting's dtype on its device, repeatably."""
        generator = torch.Generator(self.device).manual_seed(seed)

        def make(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=self.device).to(self.dtype)

        return make


@dataclass(frozen=True, kw_only=True)
class Operands:
    """One set of operands; None where the operation has no such operand.

    q: [T, H, C]. k, v: MLA's kv [S, C] and None, or GQA's [S, G, d] twice. grad_out: [T, H, V]. selection: K keys a
    row; None where every visible key is read. q_i: [T, H_I, D], k_i: [S, D], w: [T, H_I]. lse: [T, H], of
    the attention. scores: [T, S] fp32.
    """

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    grad_out: Tensor | None = None
    selection: Selection | None = None
    q_i: Tensor | None = None
    k_i: Tensor | None = None
    w: Tensor | None = None
    lse: Tensor | None = None
    scores: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor that is there, the selection's index among them."""
        own = [value for value in vars(self).values() if isinstance(value, Tensor)]
        return own if self.selection is None else [*own, self.selection.index]

    def take(self, *names: str) -> tuple[Tensor, ...]:
        """The named tensors. Raises InputError where one is not there."""
        if missing := [name for name in names if getattr(self, name) is None]:
            raise InputError(f"these operands have no {', '.join(missing)}")
        return tuple(getattr(self, name) for name in names)

    def map(self, change: Callable[[Tensor], Tensor]) -> "Operands":
        """Every floating point tensor changed."""
        own = {name: change(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **own)


def mla(setting: Setting, seed: int, selection: Selection | None) -> Operands:
    """Absorbed MLA: q, kv and the gradient of its output."""
    shape, normal = setting.shape, setting.normal(seed)
    return Operands(
        q=normal(setting.rows, shape.heads, shape.width),
        k=normal(setting.keys, shape.width),
        grad_out=normal(setting.rows, shape.heads, shape.value_dim),
        selection=selection,
    )


def gqa(setting: Setting, seed: int, selection: Selection | None) -> Operands:
    """Grouped queries: q, k, v and the gradient of the output."""
    shape, normal = setting.shape, setting.normal(seed)
    return Operands(
        q=normal(setting.rows, shape.heads, shape.head_dim),
        k=normal(setting.keys, shape.groups, shape.head_dim),
        v=normal(setting.keys, shape.groups, shape.head_dim),
        grad_out=normal(setting.rows, shape.heads, shape.head_dim),
        selection=selection,
    )


def indexer(setting: Setting, seed: int) -> Operands:
    """The indexer's q_i, k_i and w."""
    shape, normal = setting.shape, setting.normal(seed)
    return Operands(
        q_i=normal(setting.rows, shape.index_heads, shape.index_width),
        k_i=normal(setting.keys, shape.index_width),
        w=normal(setting.rows, shape.index_heads) * (shape.index_heads * shape.index_width) ** -0.5,
    )


def described(setting: Setting, operands: Operands) -> dict[str, Any]:
    """The `shape` of a record: T, S, H, K, H_I, D, order, lengths, and C, V, G; None where there is no such axis.

    K is 0 where every visible key is read.
    """
    shape, q, v = setting.shape, operands.q, operands.v
    indexed, selected = operands.q_i is not None, operands.selection is not None
    top_k = shape.top_k if selected or q is None else 0
    return {
        "T": setting.rows,
        "S": setting.keys,
        "H": None if q is None else shape.heads,
        "K": top_k,
        "H_I": shape.index_heads if indexed else None,
        "D": shape.index_width if indexed else None,
        "order": setting.order if selected else None,
        "lengths": setting.lengths if selected else None,
        "C": None if q is None else q.shape[2],
        "V": None if q is None else shape.value_dim if v is None else v.shape[2],
        "G": None if v is None else v.shape[1],
    }


def shape_named(name: str, **changes: int | None) -> Shape:
    """One of SHAPES, with the given fields changed where they are not None."""
    if name not in SHAPES:
        raise InputError(f"shape={name!r} must be one of {', '.join(SHAPES)}")
    changed = {key: value for key, value in changes.items() if value is not None}
    if unknown := changed.keys() - asdict(SHAPES[name]).keys():
        raise InputError(f"shape has no field {', '.join(sorted(unknown))}")
    return replace(SHAPES[name], **changed)
