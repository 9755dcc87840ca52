"""Frozen configuration: a sentence a field, rules checked when an object is made, all broken ones reported together.

    RunConfig ── model: ModelConfig ── attention: MLAConfig | GQAConfig ── rope: RopeConfig
        │                ├── dsa: DSAConfig ── indexer: IndexerConfig
        │                ├── mtp: MTPConfig
        │                └── moe: MoEConfig, kda: KDAConfig
        ├── data: DataConfig
        ├── train: TrainConfig ── stages: StageConfig, ...
        └── parallel: ParallelConfig

Nothing else in the package validates configuration.
"""

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import UnionType
from typing import Literal, get_args, get_origin, get_type_hints

from dsattn.errors import ConfigError, InputError

Mode = Literal["dense", "warmup", "sparse", "frozen"]
LayerType = Literal["dsa", "dense", "sliding", "linear"]
OutputGate = Literal["none", "headwise", "elementwise"]
IndexerType = Literal["full", "shared"]
ShareNumbering = Literal["dsa", "layers", "pattern"]
SharedComponent = Literal["latent_kv", "sparse_attention_index"]
Recompute = Literal["none", "selective", "full"]
Precision = Literal["bf16", "fp8", "mxfp8"]
PipelineSchedule = Literal["1F1B", "Interleaved1F1B"]
GraphScope = Literal["full_iteration", "attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba"]

NOBODY = -1  # the source of a layer that would share and has nobody to share with

_raise_problems = True


@contextlib.contextmanager
def deferred_checks() -> Iterator[None]:
    """Let objects with broken rules be made, so that `check` can report the problems of a whole tree together."""
    global _raise_problems
    before, _raise_problems = _raise_problems, False
    try:
        yield
    finally:
        _raise_problems = before


def check(config: "Checked") -> None:
    """Raise one ConfigError with every problem of `config` and of all configurations inside it."""
    problems = list(config.all_problems())
    if problems:
        raise ConfigError(problems)


def source_number(number: int, every: int, offset: int) -> int:
    """The layer (counted from 1) whose selection layer `number` uses, itself where it selects: IndexShare's rule."""
    return number - max(number - max(offset, 1), 0) % every


def parse_pipeline_layout(text: str) -> tuple[str, ...]:
    """Megatron Core's notation of what each pipeline chunk holds, written out: `Et*3|(tt|)*2mL` -> Ettt, tt, tt, mL.

    E: embedding. t: a decoder layer. m: an MTP depth. L: head and loss. x*n and (...)*n repeat; commas mean nothing.
    Chunks stand in order of execution: rank by rank, round after round. Raises InputError where it cannot be read.
    """
    written = text.replace(",", "")
    for repeated in (r"\(([^()]*)\)\*(\d+)", r"([EtmL|])\*(\d+)"):
        written = re.sub(repeated, lambda found: found[1] * int(found[2]), written)
    if wrong := re.search(r"[^EtmL|]", written):
        raise InputError(f"{wrong[0]!r} in {text!r} is none of E, t, m, L, |, x*n and (...)*n")
    if not re.fullmatch("Et*m*L", written.replace("|", "")):
        raise InputError(f"{text!r} must hold E, then decoder layers, then MTP depths, then L, the first and last once")
    return tuple(written.split("|"))


@functools.cache
def _types(config: type) -> dict[str, tuple[type, ...]]:
    """The types that each field's annotation names; fields with a list of choices have none."""
    types = {}
    for name, hint in get_type_hints(config).items():
        named = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        types[name] = tuple(get_origin(one) or one for one in named)
    return {name: found for name, found in types.items() if Literal not in found}


class Checked:
    """Base of every configuration: checks itself when made."""

    def __post_init__(self) -> None:
        if _raise_problems:
            check(self)

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each broken rule of this object alone, starting with the field's name."""
        yield from ()

    def all_problems(self, prefix: str = "") -> Iterator[str]:
        """Yield the problems of this object and of every configuration inside it, with dotted names."""
        mistyped = list(self._mistyped())
        yield from (prefix + problem for problem in mistyped)
        sound = not mistyped
        for name, inner in self._inner():
            for problem in inner.all_problems(f"{prefix}{name}."):
                sound = False
                yield problem
        if not mistyped:
            own = self.problems() if sound else self._safely(self.problems())
            yield from (prefix + problem for problem in own)

    def _mistyped(self) -> Iterator[str]:
        """Yield a sentence for each field whose value is of a type that its annotation does not name."""
        for name, types in _types(type(self)).items():
            value = getattr(self, name)
            whole = float in types and type(value) is int  # an integer is a number; True is neither
            if not whole and (not isinstance(value, types) or (isinstance(value, bool) and bool not in types)):
                wanted = " or ".join(one.__name__ for one in types).replace("NoneType", "None")
                yield f"{name}={value!r} must be of type {wanted}"

    def _inner(self) -> Iterator[tuple[str, "Checked"]]:
        for item in dataclasses.fields(self):  # pyright: ignore[reportArgumentType]
            value = getattr(self, item.name)
            values = enumerate(value) if isinstance(value, tuple) else [(None, value)]
            for index, one in values:
                if isinstance(one, Checked):
                    yield item.name if index is None else f"{item.name}.{index}", one

    @staticmethod
    def _safely(problems: Iterator[str]) -> Iterator[str]:
        """Stop quietly where a rule between fields trips over a field that is already reported."""
        with contextlib.suppress(ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            yield from problems

    def _at_least(self, least: float, *names: str) -> Iterator[str]:
        for name in names:
            value = getattr(self, name)
            if value is not None and not value >= least:  # a NaN fails too
                yield f"{name}={value} must be at least {least:g}"

    def _above_zero(self, *names: str) -> Iterator[str]:
        for name in names:
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                yield f"{name}={value} must be positive and finite"

    def _even(self, *names: str) -> Iterator[str]:
        for name in names:
            if getattr(self, name) % 2:
                yield f"{name}={getattr(self, name)} must be even: RoPE rotates pairs"

    def _one_of(self, name: str, *allowed: str) -> Iterator[str]:
        if getattr(self, name) not in allowed:
            yield f"{name}={getattr(self, name)!r} must be one of {', '.join(allowed)}"


@dataclass(frozen=True, kw_only=True)
class RopeConfig(Checked):
    """Rotary position embedding: frequencies `base ** (-2j / rope_dim)`, optionally stretched by YaRN."""

    base: float = 10_000.0
    """Base of the geometric series of frequencies."""
    scaling: Literal["none", "yarn"] = "none"
    """`yarn` interpolates low frequencies by `factor` to reach longer contexts."""
    factor: float = 40.0
    """YaRN: how many times longer the context became."""
    original_max_position: int = 4096
    """YaRN: context length of the original training."""
    beta_fast: float = 32.0
    """YaRN: dimensions that turn more often than this over the original context keep their frequency."""
    beta_slow: float = 1.0
    """YaRN: dimensions that turn less often than this are fully interpolated."""
    mscale: float = 1.0
    """YaRN: coefficient of the concentration that multiplies cos and sin (over that of `mscale_all_dim`)."""
    mscale_all_dim: float = 0.0
    """YaRN: coefficient m of the softmax scale's factor m(factor)^2; 0 leaves the scale alone."""

    def problems(self) -> Iterator[str]:
        yield from self._above_zero("base", "factor", "beta_fast", "beta_slow")
        yield from self._at_least(1, "original_max_position", "factor")
        yield from self._at_least(0, "mscale", "mscale_all_dim")
        yield from self._one_of("scaling", "none", "yarn")
        if not self.base > 1:
            yield f"base={self.base} must be above 1"
        if not self.beta_fast > self.beta_slow:
            yield f"beta_fast={self.beta_fast} must be above beta_slow={self.beta_slow}"

    def concentration(self, coefficient: float) -> float:
        """m(s, c) = 1 for s <= 1, else 0.1 c ln(s) + 1 (YaRN, arXiv 2309.00071, eq. 22)."""
        if self.scaling == "none" or self.factor <= 1:
            return 1.0
        return 0.1 * coefficient * math.log(self.factor) + 1.0


@dataclass(frozen=True, kw_only=True)
class MLAConfig(Checked):
    """Multi-latent attention (DeepSeek-V2, arXiv 2405.04434): absorbed where sparse or cached, else expanded."""

    heads: int = 128
    """Query heads H."""
    q_lora_rank: int | None = 1536
    """Width of the query latent; none projects queries straight from the hidden states."""
    kv_lora_rank: int = 512
    """Width V of the latent that keys and values share."""
    qk_nope_head_dim: int = 128
    """Query/key width of a head without position."""
    qk_rope_head_dim: int = 64
    """Query/key width with RoPE, shared by all heads on the key side; 0 for NoPE."""
    v_head_dim: int = 128
    """Value width of a head after the up-projection."""
    rope: RopeConfig = field(default_factory=RopeConfig)
    """Frequencies, used by attention and indexer alike."""
    rope_interleaved: bool = True
    """Rotate neighbouring lanes (2j, 2j+1); otherwise the halves (j, j + rope_dim/2)."""
    softmax_scale: float | None = None
    """Scale of the logits; none means (nope + rope)^-1/2, times YaRN's m^2 where `rope.mscale_all_dim` asks for it."""
    output_gate: OutputGate = "none"
    """Sigmoid gate on the heads' outputs: one number a head, or one a channel."""
    sink: bool = False
    """A learned logit a head that takes part in the softmax's denominator only."""
    norm_eps: float = 1e-6
    """Epsilon of the RMSNorms on both latents."""

    def problems(self) -> Iterator[str]:
        yield from self._at_least(1, "heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
        yield from self._at_least(0, "qk_rope_head_dim")
        yield from self._even("qk_rope_head_dim")
        yield from self._above_zero("softmax_scale", "norm_eps")
        yield from self._one_of("output_gate", "none", "headwise", "elementwise")

    @property
    def latent_width(self) -> int:
        """C: width of the absorbed queries and of the cached latents."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def scale(self) -> float:
        """The logits' scale that is used."""
        if self.softmax_scale is not None:
            return self.softmax_scale
        m = self.rope.concentration(self.rope.mscale_all_dim)
        return m * m / math.sqrt(self.qk_nope_head_dim + self.qk_rope_head_dim)


@dataclass(frozen=True, kw_only=True)
class GQAConfig(Checked):
    """Grouped-query attention."""

    heads: int = 32
    """Query heads H."""
    kv_heads: int = 8
    """Key/value groups G; query head h reads group h // (H / G)."""
    head_dim: int = 128
    """Width of a query, key or value head."""
    rope_dim: int | None = None
    """Leading lanes of a head that are rotated; none rotates all of them."""
    rope: RopeConfig = field(default_factory=RopeConfig)
    """Frequencies, used by attention and indexer alike."""
    rope_interleaved: bool = False
    """Rotate neighbouring lanes (2j, 2j+1); otherwise the halves (j, j + rope_dim/2)."""
    softmax_scale: float | None = None
    """Scale of the logits; none means head_dim^-1/2, times YaRN's m^2 where `rope.mscale_all_dim` asks for it."""
    qk_norm: bool = False
    """RMSNorm on each query and key head before RoPE (Qwen3)."""
    output_gate: OutputGate = "none"
    """Sigmoid gate on the heads' outputs: one number a head, or one a channel."""
    sink: bool = False
    """A learned logit a head that takes part in the softmax's denominator only."""
    norm_eps: float = 1e-6
    """Epsilon of the query and key norms."""

    def problems(self) -> Iterator[str]:
        yield from self._at_least(1, "heads", "kv_heads", "head_dim")
        yield from self._at_least(0, "rope_dim")
        yield from self._above_zero("softmax_scale", "norm_eps")
        yield from self._one_of("output_gate", "none", "headwise", "elementwise")
        if self.heads % max(self.kv_heads, 1):
            yield f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}"
        if self.rotated % 2:
            yield f"rope_dim={self.rotated} must be even: RoPE rotates pairs"
        if self.rotated > self.head_dim:
            yield f"rope_dim={self.rotated} must not exceed head_dim={self.head_dim}"

    @property
    def rotated(self) -> int:
        """Lanes of a head that RoPE turns."""
        return self.head_dim if self.rope_dim is None else self.rope_dim

    @property
    def scale(self) -> float:
        """The logits' scale that is used."""
        if self.softmax_scale is not None:
            return self.softmax_scale
        m = self.rope.concentration(self.rope.mscale_all_dim)
        return m * m / math.sqrt(self.head_dim)


@dataclass(frozen=True, kw_only=True)
class IndexerConfig(Checked):
    """The lightning indexer: I[t,s] = sum_h w[t,h] relu(q[t,h] . k[s]) (DeepSeek-V3.2, arXiv 2512.02556)."""

    heads: int = 64
    """Indexer heads H_I."""
    head_dim: int = 128
    """Width D of an indexer head."""
    top_k: int = 2048
    """Keys K kept per query; a query that sees fewer keeps them all."""
    query_from: Literal["q_latent", "hidden"] = "q_latent"
    """What queries are projected from: the attention's normalised query latent, or the hidden states."""
    rope_dim: int = 64
    """Lanes of a head that RoPE turns; 0 for NoPE."""
    rope_first: bool = True
    """The rotated lanes come first (DeepSeek, GLM); otherwise last (Hunyuan V4)."""
    rope_interleaved: bool = False
    """Rotate neighbouring lanes (GLM-5); otherwise halves (DeepSeek-V3.2). A wrong choice is silent."""
    hadamard: bool = False
    """Rotate queries and keys by the normalised Hadamard matrix: changes nothing but quantisation error."""
    relu: bool = True
    """ReLU between the product and the head weights."""
    k_norm_eps: float = 1e-6
    """Epsilon of the LayerNorm on the keys."""
    k_norm_fp32: bool = False
    """Run that LayerNorm in fp32 and cast back (Hunyuan V4)."""
    pool_size: int = 1
    """KPool (GLM-5.3-Flash): so many consecutive keys are scored as one and selected together; 1 scores every key."""
    pool_tail: bool = True
    """KPool: always read the keys behind a row's last complete pool too; K + pool_size - 1 keys at most."""
    pool_arithmetic: Literal["fp32", "hf"] = "fp32"
    """KPool: pool in fp32, or round and score in the order of Hugging Face's glm5_next."""
    pool_e4m3: bool = False
    """KPool: score Hadamard-rotated queries and pools rounded to float8 E4M3 with power-of-two scales."""

    def problems(self) -> Iterator[str]:
        yield from self._at_least(1, "heads", "head_dim", "top_k")
        yield from self._at_least(0, "rope_dim")
        yield from self._even("rope_dim")
        yield from self._above_zero("k_norm_eps")
        yield from self._one_of("query_from", "q_latent", "hidden")
        if self.rope_dim > self.head_dim:
            yield f"rope_dim={self.rope_dim} must not exceed head_dim={self.head_dim}"
        if self.hadamard and self.head_dim & (self.head_dim - 1):
            yield f"head_dim={self.head_dim} must be a power of two for the Hadamard rotation; or set hadamard=False"
        yield from self._at_least(1, "pool_size")
        yield from self._one_of("pool_arithmetic", "fp32", "hf")
        if self.top_k % max(self.pool_size, 1):
            yield f"top_k={self.top_k} must be a multiple of pool_size={self.pool_size}: pools are kept whole"
        for name, default in (("pool_arithmetic", "fp32"), ("pool_e4m3", False)):
            if self.pool_size == 1 and getattr(self, name) != default:
                yield f"{name}={getattr(self, name)!r} needs a pool_size above 1: nothing is pooled"
        if self.pool_arithmetic == "hf" and not self.relu:
            yield "pool_arithmetic='hf' needs relu=True: Hugging Face's glm5_next has no other scores"
        if self.pool_e4m3 and self.pool_arithmetic == "hf":
            yield "pool_e4m3=True needs pool_arithmetic='fp32': Hugging Face's glm5_next does not quantise"
        if self.pool_e4m3 and self.hadamard:
            yield "pool_e4m3=True needs hadamard=False: it rotates queries and pools itself, and twice is not at all"
        if self.pool_e4m3 and self.head_dim & (self.head_dim - 1):
            yield f"head_dim={self.head_dim} must be a power of two for the rotation of pool_e4m3"


@dataclass(frozen=True, kw_only=True)
class DSAConfig(Checked):
    """How a layer selects and who computes it."""

    indexer: IndexerConfig = field(default_factory=IndexerConfig)
    """The selector's geometry."""
    share_every: int = 1
    """Select in every n-th layer; the layers between reuse its selection and own no indexer. 1: every layer selects."""
    share_offset: int = 0
    """The first max(offset, 1) layers all select; the period starts there."""
    share_numbering: ShareNumbering = "dsa"
    """What the two count: `dsa` layers, all `layers` (Hugging Face), or symbols of a `pattern` (Megatron's hybrids)."""
    indexer_types: tuple[IndexerType, ...] | None = None
    """`full` (selects) or `shared` for each layer, in place of the two; MTP layers behind its end are full."""
    multi_layer_teacher: bool = False
    """A selecting layer's KL is the mean over all layers that use its selection (IndexCache, arXiv 2603.12201)."""
    block_bytes: int = 2**30
    """Most bytes of indexer scores alive at once; the selection has the same bits for any value."""
    precision: Precision = "bf16"
    """Operands of the selecting scores: as given (`bf16`), or rounded to `fp8` or `mxfp8`. The loss stays as it is."""
    deterministic: bool | None = None
    """Bitwise repeatable gradients; none follows `dsattn.settings` and `torch.use_deterministic_algorithms`."""
    backend: str = "auto"
    """Backend of every op by name, or `auto`: the first row of the table whose requirements are met."""

    def problems(self) -> Iterator[str]:
        yield from self._at_least(1, "share_every")
        yield from self._at_least(0, "share_offset")
        yield from self._at_least(1, "block_bytes")
        yield from self._one_of("precision", *get_args(Precision))
        if self.precision == "mxfp8" and self.indexer.head_dim % 32:
            yield f"precision='mxfp8' needs indexer.head_dim={self.indexer.head_dim} to be a multiple of 32"
        if self.precision != "bf16" and self.indexer.pool_arithmetic == "hf":
            yield f"precision={self.precision!r} needs indexer.pool_arithmetic='fp32': 'hf' has scores of its own"
        if self.precision != "bf16" and self.indexer.pool_e4m3:
            yield f"precision={self.precision!r} needs indexer.pool_e4m3=False: that rounds operands to E4M3 already"
        yield from self._one_of("share_numbering", *get_args(ShareNumbering))
        for index, kind in enumerate(self.indexer_types or ()):
            if kind not in get_args(IndexerType):
                yield f"indexer_types.{index}={kind!r} must be one of full, shared"
        if self.indexer_types is not None and (self.share_every, self.share_offset) != (1, 0):
            yield "indexer_types names the layers that select: leave share_every and share_offset at 1 and 0, or it out"
        if self.multi_layer_teacher and not self.shares:
            yield "multi_layer_teacher=True needs layers that share: set share_every above 1, or indexer_types"
        if self.multi_layer_teacher and self.indexer.pool_size > 1:
            yield "multi_layer_teacher=True needs indexer.pool_size=1: pooled keys have no loss to take a mean of"

    @property
    def shares(self) -> bool:
        """Whether any layer may use another's selection."""
        return self.share_every > 1 or "shared" in (self.indexer_types or ())


@dataclass(frozen=True, kw_only=True)
class MTPConfig(Checked):
    """Multi-token prediction (DeepSeek-V3, arXiv 2412.19437): layers behind the decoder that predict further ahead.

    Depth k = 1 .. depths reads the depth before it and the token k ahead, and predicts the token k + 1 ahead. Its layer
    is of the type of the decoder's last one.
    """

    depths: int = 0
    """Further tokens that are predicted; 0 for none."""
    repeated: bool = False
    """One layer for all depths; otherwise each depth has its own."""
    shared_components: tuple[SharedComponent, ...] | None = None
    """What later depths of a repeated layer take from the first: `latent_kv`, `sparse_attention_index`, or both."""

    def problems(self) -> Iterator[str]:
        yield from self._at_least(0, "depths")
        if self.repeated and self.depths == 0:
            yield "repeated=True needs depths of at least 1: there is no layer to repeat"
        names = self.shared_components
        for index, name in enumerate(names or ()):
            if name not in get_args(SharedComponent):
                yield f"shared_components.{index}={name!r} must be one of {', '.join(get_args(SharedComponent))}"
            elif names and name in names[:index]:
                yield f"shared_components.{index}={name!r} is there twice; name each component once"
        if names and not self.repeated:
            yield "shared_components needs repeated=True: layers of their own have keys and indexers of their own"
        if names and self.depths == 1:
            yield "shared_components needs depths of at least 2: one depth has nobody to share with"

    @property
    def num_layers(self) -> int:
        """Layers that own parameters."""
        return min(self.depths, 1) if self.repeated else self.depths

    def shares(self, component: SharedComponent) -> bool:
        """Whether depths take `component` from the first."""
        return component in (self.shared_components or ())


@dataclass(frozen=True, kw_only=True)
class MoEConfig(Checked):
    """Mixture of experts in place of the MLP (DeepSeek-V3, arXiv 2412.19437, section 2.1.2; GLM-5)."""

    experts: int = 256
    """Routed experts E."""
    experts_per_token: int = 8
    """Routed experts that each token goes to."""
    intermediate_size: int = 2048
    """Inner width of one expert's SwiGLU."""
    shared_experts: int = 1
    """Experts that every token goes to, as one SwiGLU of so many times the width; 0 for none."""
    groups: int = 1
    """Groups of neighbouring experts; a token goes to experts of `groups_per_token` of them only."""
    groups_per_token: int = 1
    """Groups that a token may go to: those with the largest sum of their two best experts."""
    routed_scaling: float = 2.5
    """Factor on the routed experts' weights."""
    normalise: bool = True
    """Divide a token's weights by their sum before that."""
    first_dense_layers: int = 3
    """Layers at the start that keep the MLP of `intermediate_size`."""

    def problems(self) -> Iterator[str]:
        names = ("experts", "experts_per_token", "intermediate_size", "groups", "groups_per_token")
        yield from self._at_least(1, *names)
        yield from self._at_least(0, "shared_experts", "first_dense_layers")
        yield from self._above_zero("routed_scaling")
        if self.intermediate_size % 8:
            yield f"intermediate_size={self.intermediate_size} must be a multiple of 8: grouped products read 16 bytes"
        groups = max(self.groups, 1)
        size = max(self.experts, 1) // groups
        if self.experts % groups:
            yield f"experts={self.experts} must be a multiple of groups={self.groups}"
        if self.groups_per_token > groups:
            yield f"groups_per_token={self.groups_per_token} must not exceed groups={self.groups}"
        if groups > 1 and size < 2:
            yield f"groups={self.groups} must hold 2 of the {self.experts} experts each: their two best rank a group"
        if self.experts_per_token > max(self.groups_per_token, 1) * size:
            yield (
                f"experts_per_token={self.experts_per_token} must not exceed the {self.groups_per_token * size} "
                "experts in the groups of a token"
            )


@dataclass(frozen=True, kw_only=True)
class KDAConfig(Checked):
    """Kimi Delta Attention (arXiv 2510.26692): linear attention with a decay for each channel."""

    heads: int = 64
    """Heads H; each has one state of head_dim x head_dim."""
    head_dim: int = 128
    """Width of a query, key or value head."""
    conv_size: int = 4
    """Taps of the causal convolution over queries, keys and values: a row and the rows before it."""
    lower_bound: float | None = -5.0
    """Least log decay of a row: lower_bound sigmoid(exp(A) x); none takes -exp(A) softplus(x)."""
    output_gate: OutputGate = "elementwise"
    """Sigmoid gate on the heads' normed outputs: one number a head, or one a channel."""
    norm_eps: float = 1e-6
    """Epsilon of the RMSNorm on the heads' outputs."""
    backend: str = "auto"
    """`fla` (the package fla-core, on a GPU), `reference` (plain torch, row by row), or `auto`: fla on a GPU."""

    def problems(self) -> Iterator[str]:
        yield from self._at_least(1, "heads", "head_dim", "conv_size")
        yield from self._above_zero("norm_eps")
        yield from self._one_of("output_gate", *get_args(OutputGate))
        yield from self._one_of("backend", "auto", "fla", "reference")
        if self.lower_bound is not None and not -math.inf < self.lower_bound < 0:
            yield f"lower_bound={self.lower_bound} must be negative and finite: a decay shrinks the state"

    @property
    def width(self) -> int:
        """H head_dim: queries, keys and values of all heads."""
        return self.heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Checked):
    """A decoder-only language model with DSA."""

    vocab_size: int = 259
    """Rows of the embedding; the byte tokenizer has 256 bytes and 3 specials."""
    hidden_size: int = 256
    """Model width M."""
    num_layers: int = 4
    """Decoder layers."""
    intermediate_size: int = 512
    """Width of the SwiGLU MLP."""
    attention: MLAConfig | GQAConfig = field(default_factory=MLAConfig)
    """The attention of `dsa` layers, and of the others where `dense_attention` is none."""
    dense_attention: MLAConfig | GQAConfig | None = None
    """The attention of `dense` and `sliding` layers."""
    dsa: DSAConfig = field(default_factory=DSAConfig)
    """Selection of the `dsa` layers."""
    mtp: MTPConfig = field(default_factory=MTPConfig)
    """Multi-token prediction behind the decoder."""
    moe: MoEConfig | None = None
    """Mixture of experts; none gives every layer an MLP."""
    kda: KDAConfig | None = None
    """The linear attention of `linear` layers."""
    layer_types: tuple[LayerType, ...] | None = None
    """`dsa`, `dense`, `sliding` or `linear` for each layer; none makes every layer `dsa`."""
    sliding_window: int | None = None
    """Keys that a row of a `sliding` layer reads: its own and those before it."""
    norm_eps: float = 1e-6
    """Epsilon of the RMSNorms between layers."""
    tie_embeddings: bool = False
    """Use the embedding as the output head."""
    init_std: float = 0.02
    """Standard deviation of fresh weights; divided by sqrt(2 num_layers) in projections into the residual stream."""

    def problems(self) -> Iterator[str]:
        yield from self._at_least(1, "vocab_size", "hidden_size", "num_layers", "intermediate_size")
        yield from self._above_zero("norm_eps", "init_std")
        indexer = self.dsa.indexer
        if self.layer_types is not None and len(self.layer_types) != self.num_layers:
            yield f"layer_types has {len(self.layer_types)} entries for num_layers={self.num_layers}; give one each"
        for index, kind in enumerate(self.layer_types or ()):
            if kind not in get_args(LayerType):
                yield f"layer_types.{index}={kind!r} must be one of {', '.join(get_args(LayerType))}"
        yield from self._problems_of_hybrids()
        if indexer.query_from == "q_latent" and getattr(self.attention, "q_lora_rank", None) is None:
            yield "dsa.indexer.query_from='q_latent' needs attention.q_lora_rank; use query_from='hidden'"
        rotated = getattr(self.attention, "qk_rope_head_dim", getattr(self.attention, "rotated", 0))
        if indexer.rope_dim not in (0, rotated):
            yield f"dsa.indexer.rope_dim={indexer.rope_dim} must be 0 or the attention's {rotated}"
        if self.mtp.shared_components and self.types[-1:] != ("dsa",):
            last = "".join(self.types[-1:])
            yield f"mtp.shared_components needs a dsa layer: MTP layers are of the last layer's type, which is {last}"
        if self.mtp.shares("latent_kv") and isinstance(self.attention, GQAConfig):
            yield "mtp.shared_components names latent_kv, which needs an MLAConfig: GQA has no latent"
        given = self.dsa.indexer_types
        if given is not None and not self.num_layers <= len(given) <= len(self.all_types):
            most = "" if not self.mtp.depths else f", or {len(self.all_types)} with the MTP layers"
            yield f"dsa.indexer_types has {len(given)} entries for num_layers={self.num_layers}; give one each{most}"
        where = "share_numbering" if given is None else "indexer_types"
        for index in [index for index, source in enumerate(self.selection_sources) if source == NOBODY][:1]:
            yield f"dsa.{where}: layer {index} (from 0) would share a selection that no dsa layer before it makes"

    def _problems_of_hybrids(self) -> Iterator[str]:
        """What MoE and layers other than `dsa` need."""
        types = self.types
        yield from self._at_least(1, "sliding_window")
        for kind, name in (("sliding", "sliding_window"), ("linear", "kda")):
            if kind in types and getattr(self, name) is None:
                yield f"{name}=None, but layer_types has a {kind} layer; set {name}"
            if kind not in types and getattr(self, name) is not None:
                yield f"{name} is set, but no layer of layer_types is {kind}; leave it out"
        if self.dense_attention is not None and not {"dense", "sliding"} & set(types):
            yield "dense_attention is set, but no layer of layer_types is dense or sliding; leave it out"
        if self.moe is not None and self.moe.first_dense_layers >= self.num_layers:
            yield (
                f"moe.first_dense_layers={self.moe.first_dense_layers} must be below num_layers={self.num_layers}, "
                "or no layer has experts"
            )
        if self.moe is not None and self.hidden_size % 8:
            yield f"hidden_size={self.hidden_size} must be a multiple of 8 with moe: grouped products read 16 bytes"

    def pipeline_problems(self, chunks: Sequence[str]) -> Iterator[str]:
        """Yield a sentence for each chunk that this model cannot be cut into; chunks as `parse_pipeline_layout` gives.

        No selection travels between chunks, so each must begin (dense layers apart) with a layer that selects.
        """
        for symbol, wanted, name in (("t", self.num_layers, "num_layers"), ("m", self.mtp.depths, "mtp.depths")):
            held = sum(chunk.count(symbol) for chunk in chunks)
            if held != wanted:
                yield f"the chunks hold {held} of {symbol!r}, but {name}={wanted}"
                return
        if self.mtp.repeated and sum("m" in chunk for chunk in chunks) > 1:
            yield "MTP depths stand in several chunks, but mtp.repeated=True gives them one layer; keep them in one"
            return
        sources, first = self.selection_sources, 0
        for number, chunk in enumerate(chunks):
            own = chunk.count("t") + (min(chunk.count("m"), 1) if self.mtp.repeated else chunk.count("m"))
            layers = range(first, first + own)
            first += own
            for layer in [layer for layer in layers if sources[layer] not in (None, *layers)][:1]:
                source = sources[layer]
                yield (
                    f"chunk {number} (of {len(chunks)}, from 0) begins with layer {layer}, which uses the selection of "
                    f"layer {source} in an earlier chunk; begin it with a layer that selects"
                )

    def graph_problems(self, scopes: Sequence[str]) -> Iterator[str]:
        """Yield a sentence for whatever CUDA graphs of `scopes` would freeze; none stands for whole layers.

        They are Megatron Core's `cuda_graph_modules`, once `cuda_graph_scope`. A graph of one layer's attention replays
        the addresses of its capture: a selection or latents that another layer hands to it would be those of the step
        that was captured. One graph of the whole iteration holds both layers.
        """
        name, way_out = "cuda_graph_modules", "use full_iteration, or name modules without attn"
        if unknown := [scope for scope in scopes if scope not in get_args(GraphScope)]:
            yield f"{name}={unknown[0]!r} must be one of {', '.join(get_args(GraphScope))}"
        if "full_iteration" in scopes and len(scopes) > 1:
            yield f"{name}={', '.join(scopes)}: full_iteration holds what the others would; give it alone"
        if scopes and "attn" not in scopes:
            return
        given = ", ".join(scopes) or "(), whole layers,"
        sources = self.selection_sources
        for layer, source in [(layer, one) for layer, one in enumerate(sources) if one not in (None, layer)][:1]:
            yield f"{name}={given} would freeze the selection that layer {layer} takes from layer {source}; {way_out}"
        for component in self.mtp.shared_components or ():
            yield f"{name}={given} would freeze the {component} of mtp.shared_components; {way_out}"

    @property
    def types(self) -> tuple[LayerType, ...]:
        """One entry a decoder layer."""
        return self.layer_types if self.layer_types is not None else ("dsa",) * self.num_layers

    @property
    def all_types(self) -> tuple[LayerType, ...]:
        """One entry a layer: the decoder's, then those of MTP, which are of the type of the last one."""
        types = self.types
        return types + types[-1:] * self.mtp.num_layers

    @property
    def has_experts(self) -> tuple[bool, ...]:
        """For each layer, MTP layers behind the decoder's, whether its MLP is a mixture of experts."""
        first = len(self.all_types) if self.moe is None else self.moe.first_dense_layers
        return tuple(index >= first for index in range(len(self.all_types)))

    def attention_of(self, kind: LayerType) -> "MLAConfig | GQAConfig":
        """The attention of layers of type `kind`, which is not `linear`."""
        return self.attention if kind == "dsa" or self.dense_attention is None else self.dense_attention

    @property
    def selection_sources(self) -> tuple[int | None, ...]:
        """For each layer, MTP layers behind the decoder's, the layer whose selection it uses; None for dense layers.

        All from 0. A layer that selects is its own source.
        """
        dsa, given = self.dsa, self.dsa.indexer_types
        sources: list[int | None] = []
        count, last = 0, NOBODY
        for index, kind in enumerate(self.all_types):
            if kind != "dsa":
                sources.append(None)
                continue
            count += 1
            if given is not None:
                selects = index >= len(given) or given[index] == "full"
            elif dsa.share_numbering == "dsa":
                selects = source_number(count, dsa.share_every, dsa.share_offset) == count
            else:
                sources.append(self._source_by_place(index))
                continue
            last = index if selects else last
            sources.append(last)
        return tuple(sources)

    def _source_by_place(self, index: int) -> int:
        """The source of dsa layer `index` where every place counts: two a layer in a pattern, its mixer and its MLP."""
        width = 2 if self.dsa.share_numbering == "pattern" else 1
        number = source_number(width * index + 1, self.dsa.share_every, self.dsa.share_offset)
        source, rest = divmod(number - 1, width)
        return NOBODY if rest or self.all_types[source] != "dsa" else source


@dataclass(frozen=True, kw_only=True)
class DataConfig(Checked):
    """Which text is read, and how it becomes packs of documents."""

    source: str = "stdlib"
    """`stdlib` (the running Python's own library), a folder, a glob, or a file: text, .jsonl or .parquet."""
    text_field: str = "text"
    """Field or column of JSONL and Parquet files that holds the text."""
    tokenizer: str = "bytes"
    """`bytes`, or the name or path of a Hugging Face tokenizer."""
    pack_tokens: int = 1024
    """Tokens T of one pack: documents laid end to end, the last one cut to fit."""
    held_out: float = 0.05
    """Share of the files kept for evaluation, chosen by a hash of their name."""
    min_document_tokens: int = 0
    """Shorter pieces of text are passed over; 0 keeps everything."""
    seed: int = 0
    """Order of the files."""
    interleave: int = 32
    """Files read side by side: consecutive packs come from different ones, so that no step learns from one text."""
    long_documents: Literal["cut", "refuse"] = "cut"
    """A document longer than a pack: cut into several, or a bad document."""
    bad_documents: Literal["stop", "skip"] = "stop"
    """A document that cannot be read, or is refused: end the run, or go on without it, on all ranks alike."""

    def problems(self) -> Iterator[str]:
        yield from self._at_least(2, "pack_tokens")
        yield from self._at_least(1, "interleave")
        yield from self._at_least(0, "min_document_tokens", "seed")
        yield from self._one_of("long_documents", "cut", "refuse")
        yield from self._one_of("bad_documents", "stop", "skip")
        if not self.source:
            yield "source='' must name text: a folder, a glob, a file, or 'stdlib'"
        if not 0 <= self.held_out < 1:
            yield f"held_out={self.held_out} must be in [0, 1)"


@dataclass(frozen=True, kw_only=True)
class StageConfig(Checked):
    """A stretch of training in one mode."""

    mode: Mode = "sparse"
    """`dense` (no indexer), `warmup` (only the indexer learns), `sparse` (both learn), `frozen` (indexer fixed)."""
    steps: int = 100
    """Optimiser steps; 0 leaves the stage out."""
    lr: float = 1e-3
    """Peak learning rate."""
    lr_warmup: int = 0
    """Steps of linear warm-up from zero; a shorter stage ends within it."""
    lr_final: float = 0.1
    """Learning rate at the end, as a share of the peak; the way there is a half cosine."""
    kl_weight: float = 1.0
    """Weight of the indexer's KL loss beside the language-model loss."""
    mtp_weight: float = 0.1
    """Weight of the multi-token prediction loss, the mean of its depths, beside the language-model loss."""
    router_bias_rate: float = 1e-3
    """MoE: how far each expert's routing bias moves a step, towards equal loads; 0 leaves it."""
    balance_weight: float = 0.0
    """MoE: weight of the sequence-wise balance loss, summed over layers; 0 computes none."""
    packs_per_step: int | None = None
    """Packs in one optimiser step of this stage; none takes `train.packs_per_step`."""

    def problems(self) -> Iterator[str]:
        yield from self._one_of("mode", "dense", "warmup", "sparse", "frozen")
        yield from self._at_least(0, "steps", "lr_warmup")
        if self.packs_per_step is not None:
            yield from self._at_least(1, "packs_per_step")
        yield from self._above_zero("lr", "kl_weight", "mtp_weight")
        yield from self._at_least(0, "router_bias_rate", "balance_weight")
        if not 0 <= self.lr_final <= 1:
            yield f"lr_final={self.lr_final} must be in [0, 1]"


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Checked):
    """The training run."""

    stages: tuple[StageConfig, ...] = (StageConfig(),)
    """Stages in order; the model goes on from one to the next with a fresh optimiser."""
    packs_per_step: int = 8
    """Packs in one optimiser step, over all micro-batches and data-parallel ranks."""
    packs_per_micro_batch: int = 8
    """Packs in one forward; losses and gradients do not depend on it."""
    weight_decay: float = 0.1
    """AdamW weight decay of matrices; vectors get none."""
    beta1: float = 0.9
    """AdamW decay of the first moment."""
    beta2: float = 0.95
    """AdamW decay of the second moment."""
    grad_clip: float = 1.0
    """Largest global gradient norm; larger ones are scaled down."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of the layers; parameters and optimiser stay fp32."""
    recompute: Recompute = "none"
    """What runs again in the backward instead of staying in memory: nothing; norms, MLA's up-projections, attention and
    MLPs (`selective`); or whole layers (`full`)."""
    recompute_reuse_selection: bool = True
    """Replays use the selections and the indexers' losses of the first pass; otherwise they make both again."""
    compile: bool = False
    """Layers' MLPs, shared experts too, go through `torch.compile`. Memory is planned without."""
    device: str = "auto"
    """`auto` takes a GPU where there is one."""
    seed: int = 0
    """Seed of fresh weights."""
    run_dir: str = "runs/latest"
    """Folder of checkpoints, metrics, TensorBoard events, summary and report."""
    resume: Literal["auto", "never", "must"] = "auto"
    """Go on from the newest checkpoint in `run_dir`: where there is one, never (refuses a used folder), or always."""
    init_from: str | None = None
    """Checkpoint whose weights a new run starts from."""
    fresh_indexer: bool = False
    """With `init_from`: start the indexer anew; an error where that checkpoint's indexer was trained."""
    log_every: int = 10
    """Steps between lines of metrics."""
    eval_every: int = 100
    """Steps between evaluations on held-out text; stages end with one in any case."""
    eval_packs: int = 8
    """Held-out packs in an evaluation."""
    save_every: int = 100
    """Steps between checkpoints; stages end with one in any case."""
    keep_checkpoints: int = 3
    """Newest checkpoints that are kept."""
    async_save: bool = False
    """On many ranks, write checkpoints while training goes on; costs a copy of this rank's state in host memory."""
    tensorboard: bool = True
    """Write TensorBoard events."""

    def problems(self) -> Iterator[str]:
        yield from self._at_least(1, "packs_per_step", "packs_per_micro_batch", "log_every", "eval_every", "eval_packs")
        yield from self._at_least(1, "save_every", "keep_checkpoints")
        yield from self._at_least(0, "weight_decay", "seed")
        yield from self._above_zero("grad_clip")
        yield from self._one_of("dtype", "float32", "bfloat16")
        yield from self._one_of("recompute", *get_args(Recompute))
        if self.recompute == "none" and not self.recompute_reuse_selection:
            yield "recompute_reuse_selection=False needs recompute='selective' or 'full': nothing else selects twice"
        yield from self._one_of("resume", "auto", "never", "must")
        if not self.run_dir:
            yield "run_dir='' must name a folder"
        if not any(stage.steps for stage in self.stages):
            yield "stages has no steps; give at least one stage some"
        for name, packs in self.batches.items():
            if packs % max(self.packs_per_micro_batch, 1):
                yield f"{name}={packs} must be a multiple of packs_per_micro_batch={self.packs_per_micro_batch}"
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                yield f"{name}={getattr(self, name)} must be in [0, 1)"
        if self.fresh_indexer and self.init_from is None:
            yield "fresh_indexer=True needs init_from; a new run's indexer is fresh anyway"

    @property
    def batches(self) -> dict[str, int]:
        """Packs in one optimiser step, by the name of the field that says so."""
        stages = {f"stages.{i}.packs_per_step": stage.packs_per_step for i, stage in enumerate(self.stages)}
        return {"packs_per_step": self.packs_per_step} | {name: n for name, n in stages.items() if n is not None}


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Checked):
    """Degrees of parallelism. Their product without `ep` is the number of processes that `torchrun` starts."""

    dp_replicate: int = 1
    """Replicas of the whole model."""
    dp_shard: int = 1
    """Ranks that shard parameters, gradients and optimiser (FSDP2); context parallel ranks shard them further."""
    cp: int = 1
    """Context parallel ranks: each owns zigzag rows of every document."""
    tp: int = 1
    """Tensor parallel ranks: heads are split."""
    pp: int = 1
    """Pipeline ranks."""
    vpp: int = 1
    """Pipeline chunks of each pipeline rank."""
    ep: int = 1
    """Expert parallel ranks, taken from those of dp_shard, cp and tp."""
    pipeline_layout: str | None = None
    """What each pipeline chunk holds, in Megatron's notation (`Et*4|t*4mL`); none splits the layers evenly."""
    schedule: PipelineSchedule = "1F1B"
    """Order of the micro-batches in the pipeline; `Interleaved1F1B` where vpp is above 1."""
    sequence_parallel: bool = True
    """Keep the residual stream of tensor parallel ranks split by rows between the parts that are split by heads."""
    split_indexer_rows: bool = True
    """Each tensor parallel rank selects, and takes the loss, for its share of the rows; otherwise every one for all."""
    dynamic_cp: bool = False
    """Cut a micro-batch of short documents over fewer context parallel ranks, several groups of which then share it."""
    check_ranks: bool = False
    """For debugging: in every layer, end the run where tensor parallel ranks selected different keys, or a layout holds
    another rank's rows. Waits for the device."""

    def problems(self) -> Iterator[str]:
        yield from self._at_least(1, "dp_replicate", "dp_shard", "cp", "tp", "pp", "vpp", "ep")
        yield from self._one_of("schedule", *get_args(PipelineSchedule))
        if self.vpp > 1 and self.pp == 1:
            yield f"vpp={self.vpp} needs a pp above 1: one rank has no pipeline to cut finer"
        if self.pp > 1 and (self.schedule == "Interleaved1F1B") != (self.vpp > 1):
            yield f"schedule={self.schedule!r} does not fit vpp={self.vpp}: 1F1B has one chunk a rank"
        if self.dynamic_cp and self.cp == 1:
            yield "dynamic_cp=True needs a cp above 1: one rank cannot be grouped"
        if self.ep > 0 and (self.dp_shard * self.cp * self.tp) % self.ep:
            yield f"ep={self.ep} must divide dp_shard * cp * tp = {self.dp_shard * self.cp * self.tp}"
        if self.ep > 1 and self.tp > 1 and not self.sequence_parallel:
            yield f"ep={self.ep} with tp={self.tp} needs sequence_parallel=True: else experts get rows {self.tp} times"
        if self.check_ranks and self.tp > 1 and self.sequence_parallel and self.split_indexer_rows:
            yield "check_ranks=True needs split_indexer_rows=False: ranks that select for other rows cannot compare"
        if self.pipeline_layout is None:
            return
        try:
            count = len(parse_pipeline_layout(self.pipeline_layout))
        except InputError as error:
            yield f"pipeline_layout: {error}"
            return
        if count != self.pp * self.vpp:
            yield f"pipeline_layout has {count} chunks, but pp * vpp = {self.pp * self.vpp}; give one each"

    def world_problems(self, processes: int) -> Iterator[str]:
        """Yield a sentence where the degrees do not make `processes` processes."""
        if processes != self.world_size:
            yield (
                f"dp_replicate * dp_shard * cp * tp * pp = {self.world_size}, but {processes} process(es) were "
                f"started; start torchrun with --nproc_per_node={self.world_size}, or that many over all nodes"
            )

    def model_problems(self, model: ModelConfig) -> Iterator[str]:
        """Yield a sentence for each degree that `model` cannot be cut into; those below 1 are told already."""
        tp = max(self.tp, 1)
        ep = max(self.ep, 1)
        attentions = [model.attention_of(kind) for kind in model.all_types if kind != "linear"]
        for attention in dict.fromkeys(attentions):
            for name in ("heads", "kv_heads"):
                if (count := getattr(attention, name, 0)) % tp:
                    yield f"tp={self.tp} must divide the attention's {name}={count}"
        if model.intermediate_size % tp:
            yield f"tp={self.tp} must divide model.intermediate_size={model.intermediate_size}"
        if model.kda is not None and self.cp > 1:
            yield f"cp={self.cp} must be 1 with linear layers: their state would have to pass from rank to rank"
        if model.kda is not None and model.kda.heads % tp:
            yield f"tp={self.tp} must divide model.kda.heads={model.kda.heads}"
        if self.ep > 1 and model.moe is None:
            yield f"ep={self.ep} needs model.moe: there are no experts to split"
        if model.moe is not None and model.moe.experts % ep:
            yield f"ep={self.ep} must divide model.moe.experts={model.moe.experts}"
        for problem in model.pipeline_problems(self.chunks(model.num_layers, model.mtp.depths)):
            yield f"pipeline_layout: {problem}"

    def batch_problems(self, train: TrainConfig) -> Iterator[str]:
        """Yield a sentence where a step's packs cannot be dealt to the ranks."""
        ranks = max(self.batch_ranks, 1)  # degrees below 1 are told already
        for name, packs in train.batches.items():
            own = packs // ranks
            micro = min(train.packs_per_micro_batch, own)
            if packs % ranks:
                yield (
                    f"dp_replicate * dp_shard = {self.batch_ranks} must divide train.{name}={packs}: "
                    "every rank takes as many packs"
                )
            elif micro < 1:
                continue  # told already
            elif own % micro:
                yield f"train.packs_per_micro_batch={micro} must divide the {own} packs of train.{name} on each rank"
            elif (count := own // micro) < self.pp:
                yield (
                    f"pp={self.pp} needs as many micro-batches a step, but train.packs_per_micro_batch="
                    f"{train.packs_per_micro_batch} makes {count} of train.{name}={packs}; lower it"
                )
            elif self.vpp > 1 and count % max(self.pp, 1):
                yield f"vpp={self.vpp} needs a multiple of pp={self.pp} micro-batches a step, but there are {count}"

    @property
    def world_size(self) -> int:
        """Processes."""
        return self.dp_replicate * self.dp_shard * self.cp * self.tp * self.pp

    @property
    def batch_ranks(self) -> int:
        """Ranks, or groups of ranks, that train on different packs."""
        return self.dp_replicate * self.dp_shard

    def chunks(self, num_layers: int, mtp_depths: int) -> tuple[str, ...]:
        """What each pipeline chunk holds, as `parse_pipeline_layout` gives it.

        Without a layout each of `pp * vpp` chunks gets as many decoder layers, the first ones one more where that does
        not come out even, and the last one MTP. Chunk c runs on pipeline rank c % pp.
        """
        if self.pipeline_layout is not None:
            return parse_pipeline_layout(self.pipeline_layout)
        count = max(self.pp * self.vpp, 1)
        each, more = divmod(num_layers, count)
        held = ["t" * (each + (chunk < more)) for chunk in range(count)]
        held[0] = "E" + held[0]
        held[-1] += "m" * mtp_depths + "L"
        return tuple(held)


@dataclass(frozen=True, kw_only=True)
class RunConfig(Checked):
    """A whole run: what a recipe returns."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The network."""
    data: DataConfig = field(default_factory=DataConfig)
    """The text."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Stages, optimiser, checkpoints."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Degrees of parallelism."""

    def problems(self) -> Iterator[str]:
        if self.data.tokenizer == "bytes" and self.model.vocab_size < 259:
            yield f"model.vocab_size={self.model.vocab_size} must be at least 259 for the byte tokenizer"
        for problem in self.parallel.model_problems(self.model):
            yield f"parallel.{problem}"
        for problem in self.parallel.batch_problems(self.train):
            yield f"parallel: {problem}"
        if "dsa" not in self.model.types:
            for index, stage in enumerate(self.train.stages):
                if stage.mode != "dense":
                    yield f"train.stages.{index}.mode={stage.mode!r} needs a dsa layer in model.layer_types"
        for index, stage in enumerate(self.train.stages):
            if stage.balance_weight > 0 and self.model.moe is None:
                yield f"train.stages.{index}.balance_weight={stage.balance_weight} needs model.moe: no layer routes"
        if not self.train.recompute_reuse_selection and self.model.dsa.deterministic is not True:
            yield (
                "train.recompute_reuse_selection=False needs model.dsa.deterministic=True: a replay that selects other "
                "keys gives gradients of another function"
            )
        pool_size = self.model.dsa.indexer.pool_size
        for index, stage in enumerate(self.train.stages):
            if pool_size > 1 and stage.mode in ("warmup", "sparse"):
                yield (
                    f"train.stages.{index}.mode={stage.mode!r} trains the indexer, but model.dsa.indexer.pool_size="
                    f"{pool_size} leaves it without a loss: a pool's score teaches no single key; use frozen or dense"
                )
