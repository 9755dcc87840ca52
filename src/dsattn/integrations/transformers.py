"""Train a live Hugging Face model with dsattn: `patch(model)` before the loop, nothing else changes.

The forward of every attention layer is replaced on the instance, and hooks on the model hand each call's layout down
and the indexers' loss up. Parameters keep their names and places, so checkpoints, FSDP, PEFT and gradient checkpointing
work as before, and `undo` leaves no trace. A call that makes or uses a key/value cache runs Hugging Face's own code;
packed documents get none.
"""

import functools
import importlib.metadata
import logging
import math
import types
from dataclasses import replace
from typing import Any, get_args

from torch import nn

from dsattn.config import Recompute
from dsattn.errors import InputError
from dsattn.integrations.attention import attention_forward
from dsattn.integrations.families import Family, class_names, family_of, fingerprint
from dsattn.integrations.glm5_next import linear_attention_forward
from dsattn.integrations.hooks import TWICE, after_body, after_head, before_body, before_head, checkpoints_itself
from dsattn.integrations.microbatch import Mode, Settings
from dsattn.integrations.recompute import Forward, other_parts, runs_again

LATENT_NORMS = ("q_a_layernorm", "kv_a_layernorm", "k_rope_only_layernorm")
logger = logging.getLogger(__name__)


class Patch:
    """A patched model. `undo()`, or the end of a `with` block, restores it.

    model_type: the family. mode, recompute: see `patch`. layers: attention layers that were replaced; selecting: those
    with an indexer. trainable: parameters that learn, as (of indexers, all others). pools: the indexers select pools of
    keys, which teach them nothing, so they are fixed in every mode.
    """

    def __init__(self, family: Family, mode: Mode, recompute: Recompute = "none"):
        self.model_type = family.model_type
        self.pools = family.pools
        self.mode: Mode = mode
        self.recompute: Recompute = recompute
        self.layers: tuple[str, ...] = ()
        self.selecting: tuple[str, ...] = ()
        self.loss_heads: tuple[str, ...] = ()
        self.trainable: tuple[int, int] = (0, 0)
        self._forwards: list[nn.Module] = []
        self._hooks: list[Any] = []
        self._grads: list[tuple[nn.Parameter, bool]] = []
        self._eps: list[tuple[Any, float]] = []

    def undo(self) -> None:
        """Put everything back that `patch` changed: forwards, hooks, which parameters learn, norm epsilons."""
        for module in self._forwards:
            del module.__dict__["forward"]
        for hook in self._hooks:
            hook.remove()
        for parameter, learns in self._grads:
            parameter.requires_grad_(learns)
        for norm, eps in self._eps:
            norm.variance_epsilon = eps
        for undone in (self._forwards, self._hooks, self._grads, self._eps):
            undone.clear()

    def __enter__(self) -> "Patch":
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __str__(self) -> str:
        indexer, other = self.trainable
        where = (
            f"their loss is added by {', '.join(self.loss_heads)}"
            if self.loss_heads
            else "no loss head was found: add outputs.indexer_loss to your loss"
        )
        loss = "indexers are fixed" if self.mode == "frozen" else where
        if self.pools:
            loss = "indexers are fixed: they select pools of keys, and a pool's score teaches no single key"
        return (
            f"dsattn patched {self.model_type}, mode {self.mode}: {len(self.layers)} attention layers, "
            f"{len(self.selecting)} with an indexer; {indexer} indexer parameters and {other} others learn; {loss}"
            + ("" if self.recompute == "none" else f"; recompute {self.recompute}")
        )


def patch(
    model: nn.Module,
    *,
    mode: Mode = "sparse",
    backend: str = "auto",
    indexer_loss_coeff: float | None = None,
    norm_eps: str = "model",
    deterministic: bool | None = None,
    recompute: Recompute = "none",
    check_source: bool = True,
) -> Patch:
    """Replace the attention of a Hugging Face model, on this instance. Works as a context manager too.

    model: a model of a family in `families.FAMILIES`, or one that holds it (PEFT). Patch before FSDP or DDP wrap it.
    mode: `sparse`: everything that learned goes on to, and the indexers learn from their KL to attention, over the
        selected keys; those of glm5_next, which select pools, stay fixed. `warmup`: dense attention, only the indexers
        learn, over all visible keys; the loss is their KL alone. `frozen`: sparse attention with fixed indexers.
        Parameters' requires_grad is set to fit, until `undo`.
    indexer_loss_coeff: weight of the indexers' loss (sum over layers of the mean over real rows), default 1. In
        training mode it is in `outputs.loss`; `outputs.indexer_loss` and `outputs.lm_loss` are its parts, detached.
        With `num_items_in_batch`, as `Trainer` passes it under gradient accumulation, it counts by this call's share of
        the labels. A call without labels leaves it, attached, in `outputs.indexer_loss`.
    norm_eps: `model` keeps the latent norms' epsilon of the Hugging Face code (1e-6 in glm_moe_dsa and hy_v4); `config`
        takes rms_norm_eps.
    backend, deterministic: as in `dsattn.ops`.
    recompute: what runs again in the backward instead of staying in memory: attention behind its first projections and
        the MLP (`selective`), or whole decoder layers (`full`); see `integrations.recompute`. Not beside the model's
        own gradient checkpointing.
    check_source: refuse a transformers version whose code was not read for this.

    Raises InputError for unknown families and versions, a model that is patched already, attention dropout, recompute
    beside gradient checkpointing, and an indexer loss (`warmup`, or a coefficient) of indexers that select pools.
    """
    settings = _settings(mode, backend, indexer_loss_coeff, norm_eps, deterministic, recompute)
    family, bodies = family_of(model)
    if family.pools:
        settings = _settings_of_pools(family, settings, indexer_loss_coeff)
    layers = [(name, m) for name, m in model.named_modules() if family.attention in class_names(m)]
    for name, attention in layers:
        _check_attention(family, name, attention)
    if check_source:
        _check_sources(family, bodies)
    if recompute != "none" and any(map(checkpoints_itself, bodies)):
        raise InputError(f"recompute={recompute!r} {TWICE}")

    patched = Patch(family, mode, recompute)
    patched.layers = tuple(name for name, _ in layers)
    patched.selecting = tuple(name for name, m in layers if getattr(m, "indexer", None) is not None)
    try:
        _install(patched, settings, family, model, bodies)
        if norm_eps == "config":
            for _, attention in layers:
                patched._eps += _set_eps(attention)
        patched._grads = _set_learning(model, [attention for _, attention in layers], settings.mode)
    except BaseException:
        patched.undo()
        raise
    patched.trainable = _count_learning(model)
    logger.info("%s", patched)
    return patched


def apply_dsattn_to_deepseek_v32(model: nn.Module, **options: Any) -> Patch:
    """`patch` for DeepSeek-V3.2; refuses another family."""
    return _apply("deepseek_v32", model, options)


def apply_dsattn_to_glm_moe_dsa(model: nn.Module, **options: Any) -> Patch:
    """`patch` for GLM-5, 5.1, 5.2, 5.3; refuses another family."""
    return _apply("glm_moe_dsa", model, options)


def apply_dsattn_to_axk2(model: nn.Module, **options: Any) -> Patch:
    """`patch` for A.X-K2; refuses another family."""
    return _apply("axk2", model, options)


def apply_dsattn_to_hy_v4(model: nn.Module, **options: Any) -> Patch:
    """`patch` for Hunyuan V4; refuses another family."""
    return _apply("hy_v4", model, options)


def apply_dsattn_to_mistral_large4(model: nn.Module, **options: Any) -> Patch:
    """`patch` for Mistral Large 4; refuses another family."""
    return _apply("mistral_large4_text", model, options)


def apply_dsattn_to_dots3_note(model: nn.Module, **options: Any) -> Patch:
    """`patch` for dots3.note; refuses another family."""
    return _apply("dots3_note_text", model, options)


def apply_dsattn_to_glm5_next(model: nn.Module, **options: Any) -> Patch:
    """`patch` for GLM-5.3-Flash; refuses another family."""
    return _apply("glm5_next_text", model, options)


def _apply(model_type: str, model: nn.Module, options: dict[str, Any]) -> Patch:
    found = family_of(model)[0].model_type
    if found != model_type:
        raise InputError(f"model is a {found}, not a {model_type}; use dsattn.integrations.transformers.patch")
    return patch(model, **options)


def _settings(
    mode: Mode,
    backend: str,
    coefficient: float | None,
    norm_eps: str,
    deterministic: bool | None,
    recompute: Recompute,
) -> Settings:
    if mode not in get_args(Mode):
        raise InputError(f"mode={mode!r} must be one of {', '.join(get_args(Mode))}")
    if recompute not in get_args(Recompute):
        raise InputError(f"recompute={recompute!r} must be one of {', '.join(get_args(Recompute))}")
    if norm_eps not in ("model", "config"):
        raise InputError(f"norm_eps={norm_eps!r} must be 'model' or 'config'")
    if coefficient is not None and mode == "frozen":
        raise InputError(f"indexer_loss_coeff={coefficient} has no use in mode='frozen'; leave it out, or use 'sparse'")
    if coefficient is not None and not (math.isfinite(coefficient) and coefficient > 0):
        raise InputError(f"indexer_loss_coeff={coefficient} must be finite and above 0; mode='frozen' has no loss")
    return Settings(mode, backend, 1.0 if coefficient is None else float(coefficient), deterministic, recompute)


def _settings_of_pools(family: Family, settings: Settings, coefficient: float | None) -> Settings:
    asked = f"indexer_loss_coeff={coefficient}" if settings.mode != "warmup" else "mode='warmup'"
    if settings.mode == "warmup" or coefficient is not None:
        raise InputError(
            f"{asked} asks for a loss of the indexers, but those of {family.model_type} select pools of keys, and a "
            "pool's score teaches no single key; mode='sparse' trains the rest of the model, its indexers as they are"
        )
    return replace(settings, mode="frozen")


def _check_attention(family: Family, name: str, attention: Any) -> None:
    _check_forward(name, attention)
    if attention.attention_dropout:
        raise InputError(
            f"{family.model_type} has attention_dropout={attention.attention_dropout}; sparse attention has "
            "no dropout, set config.attention_dropout=0 before the model is built"
        )


def _check_forward(name: str, module: nn.Module) -> None:
    if "forward" in module.__dict__:
        raise InputError(
            f"{name} has a forward of its own already: undo the earlier patch, or patch before other tools"
        )


def _check_sources(family: Family, bodies: list[nn.Module]) -> None:
    for body in bodies:
        if (found := fingerprint(family, body)) not in family.sources.values():
            raise InputError(
                f"{type(body).__module__} of transformers {importlib.metadata.version('transformers')} is another "
                f"version than dsattn knows (fingerprint {found}): install transformers {' or '.join(family.sources)}, "
                "or pass check_source=False and compare logits with the unpatched model"
            )


def _install(patched: Patch, settings: Settings, family: Family, model: nn.Module, bodies: list[nn.Module]) -> None:
    forwards = {family.attention: attention_forward, family.linear_attention: linear_attention_forward}
    for attention in model.modules():
        for name in class_names(attention) & forwards.keys():
            _replace(patched, attention, runs_again(patched.recompute, "attention", forwards[name]))
    for name, part, forward in other_parts(patched.recompute, bodies):
        _check_forward(name, part)
        _replace(patched, part, forward)
    heads = [m for m in model.modules() if class_names(m) & set(family.heads)]
    patched.loss_heads = tuple(type(m).__name__ for m in heads)
    for head in heads:
        patched._hooks.append(head.register_forward_pre_hook(before_head, with_kwargs=True))
        after = functools.partial(after_head, settings)
        patched._hooks.append(head.register_forward_hook(after, with_kwargs=True))
    for body in bodies:
        before, after = functools.partial(before_body, settings, family), functools.partial(after_body, settings)
        patched._hooks.append(body.register_forward_pre_hook(before, with_kwargs=True))
        patched._hooks.append(body.register_forward_hook(after, with_kwargs=True))


def _replace(patched: Patch, module: nn.Module, forward: Forward) -> None:
    module.forward = types.MethodType(forward, module)
    patched._forwards.append(module)


def _set_eps(attention: Any) -> list[tuple[Any, float]]:
    norms = [norm for name in LATENT_NORMS if (norm := getattr(attention, name, None)) is not None]
    before = [(norm, norm.variance_epsilon) for norm in norms]
    for norm in norms:
        norm.variance_epsilon = attention.config.rms_norm_eps
    return before


def _set_learning(model: nn.Module, layers: list[Any], mode: Mode) -> list[tuple[nn.Parameter, bool]]:
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    if mode == "warmup":
        model.requires_grad_(False)
    for attention in layers:
        indexer = getattr(attention, "indexer", None)
        for name, parameter in [] if indexer is None else indexer.named_parameters():
            unused = name.startswith("original_module.")  # of PEFT's modules_to_save, beside the copy that learns
            parameter.requires_grad_(mode != "frozen" and not unused)
    return before


def _count_learning(model: nn.Module) -> tuple[int, int]:
    learning = [(name, p.numel()) for name, p in model.named_parameters() if p.requires_grad]
    indexer = sum(count for name, count in learning if ".indexer." in name)
    return indexer, sum(count for _, count in learning) - indexer
