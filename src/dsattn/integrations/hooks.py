"""Hooks on a patched model: a call's layout goes down as an argument, the indexers' loss comes up with the outputs.

A body makes masks and runs the layers; a head has a body below it and computes a language model's loss.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from dsattn.errors import InputError
from dsattn.integrations.families import Family, class_names
from dsattn.integrations.glm5_next import packed_documents
from dsattn.integrations.microbatch import MICROBATCH, Microbatch, Report, Settings, layout_of

REPORT = "dsattn_report"
TWICE = (
    "and the model's own gradient checkpointing would run layers again twice: switch that off "
    "(gradient_checkpointing_disable(), and gradient_checkpointing=False of a trainer), or patch with recompute='none'"
)


def checkpoints_itself(body: Any) -> bool:
    """Whether layers run again by transformers' gradient checkpointing, or by a wrapper of torch's."""
    wrapped = (class_names(layer) & {"CheckpointWrapper"} for layer in body.layers)
    return any(wrapped) or any(getattr(layer, "gradient_checkpointing", False) for layer in body.layers)


def _named(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _uses_cache(module: Any, kwargs: dict[str, Any]) -> bool:
    """Whether this call makes or uses a key/value cache; unless asked for, a call that trains or packs has none."""
    given = kwargs.get("cache") is not None or kwargs.get("past_key_values") is not None
    training = module.training and torch.is_grad_enabled()
    unasked = kwargs.get("use_cache") is None and not given
    if unasked and (training or kwargs.get("labels") is not None or _packs(kwargs)):
        kwargs["use_cache"] = False
    wanted = kwargs.get("use_cache")
    used = given or bool(module.config.get_text_config().use_cache if wanted is None else wanted)
    if used and training:
        raise InputError(
            "a key/value cache in training would run attention that teaches no indexer; pass use_cache=False"
        )
    if wanted and not given and _packs(kwargs):
        raise InputError(
            "use_cache=True with several documents in a sample would let them see each other: a cache holds one "
            "document a sample; pass use_cache=False"
        )
    return used


def _packs(kwargs: dict[str, Any]) -> bool:
    """Whether a sample holds several documents. Reads position_ids: one device sync."""
    if (edges := _cu_seq_lens(kwargs)) is not None:
        return edges.numel() > 2
    ids, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    if ids is None:
        return False
    restarts = ids[..., 1:] == 0
    if isinstance(mask, Tensor) and mask.dim() == 2:  # positions of padding say nothing
        real = mask.to(ids.device, torch.bool)
        restarts = restarts & real[:, 1:] & real[:, :-1]
    return bool(restarts.any())


def before_head(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
    kwargs = _named(module, args, kwargs)
    if not _uses_cache(module, kwargs):
        kwargs = {**kwargs, "use_cache": False, REPORT: Report(owned=True)}
    return (), kwargs


def before_body(
    settings: Settings, family: Family, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[()], dict[str, Any]]:
    kwargs = _named(module, args, kwargs)
    report = kwargs.pop(REPORT, None)
    if _uses_cache(module, kwargs):
        return (), kwargs
    if kwargs.get("output_attentions") or getattr(module.config, "output_attentions", False):
        raise InputError("output_attentions=True asks for weights that sparse attention never makes; leave it out")
    inputs = kwargs.get("input_ids")
    inputs = kwargs.get("inputs_embeds") if inputs is None else inputs
    if inputs is None:
        raise InputError("input_ids and inputs_embeds are both None; pass one")
    trains = module.training and torch.is_grad_enabled()
    learns = settings.mode != "frozen" and trains
    if learns:
        settings.watch.check()
    if learns and not any(p.requires_grad for name, p in module.named_parameters() if ".indexer." in name):
        raise InputError(
            f"mode={settings.mode!r} trains the indexers, but none of their parameters asks for a gradient (PEFT fixes "
            "what it wraps): patch after get_peft_model, or patch with mode='frozen'"
        )
    mask = kwargs.get("attention_mask")
    if isinstance(mask, dict):
        mask = mask["indexed_attention"]
    for kind in ("sliding", "linear"):
        if isinstance(mask, Tensor) and mask.dim() == 4 and f"{kind}_attention" in family.mask_keys:
            raise InputError(
                f"a 4D attention_mask does not say what {kind} layers see; pass position_ids or cu_seq_lens_q"
            )
    layout = layout_of(inputs.shape[0], inputs.shape[1], mask, kwargs.get("position_ids"), _cu_seq_lens(kwargs))
    kwargs["attention_mask"] = dict.fromkeys(family.mask_keys)
    documents = ()
    if "linear_attention" in family.mask_keys:
        kwargs["attention_mask"]["linear_attention"] = mask if mask is None else mask.to(inputs.device, torch.bool)
        documents = packed_documents(layout, inputs.shape[1])
    kwargs["use_cache"] = False
    replays = trains and checkpoints_itself(module)
    if replays and settings.recompute != "none":
        raise InputError(f"recompute={settings.recompute!r} {TWICE}")
    kwargs[MICROBATCH] = Microbatch(
        settings, layout.to(inputs.device), learns, report or Report(owned=False), {} if replays else None, documents
    )
    return (), kwargs


def _cu_seq_lens(kwargs: dict[str, Any]) -> Tensor | None:
    q, k = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if q is not None and k is not None and not torch.equal(q, k):
        raise InputError("cu_seq_lens_q and cu_seq_lens_k differ; packed self-attention has one set of documents")
    return k if q is None else q


def after_body(
    settings: Settings, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any
) -> None:
    """Without a loss head above, the indexers' loss stays with the body's outputs, attached."""
    microbatch = kwargs.get(MICROBATCH)
    if microbatch is None or microbatch.report.owned or not microbatch.report.losses:
        return
    if isinstance(outputs, tuple):
        raise InputError("return_dict=False leaves no place for the indexers' loss; leave it out")
    indexer_loss = settings.indexer_loss_coeff * _total(microbatch.report.take())
    settings.watch.follow(list(outputs.values()), indexer_loss)
    outputs["indexer_loss"] = indexer_loss


def after_head(settings: Settings, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any):
    report = kwargs.get(REPORT)
    if report is None:
        return None
    if not report.losses:
        if settings.mode != "frozen" and module.training and torch.is_grad_enabled():
            raise InputError(f"{type(module).__name__} reached no layer with an indexer; is part of it replaced?")
        return None
    total = settings.indexer_loss_coeff * _total(report.take())
    indexer_loss = total * _share(kwargs)
    labelled = kwargs.get("labels") is not None
    watched = outputs[labelled:] if isinstance(outputs, tuple) else [v for k, v in outputs.items() if k != "loss"]
    settings.watch.follow(watched, total)
    if isinstance(outputs, tuple):
        if not labelled:
            raise InputError("return_dict=False without labels leaves no place for the indexers' loss; leave it out")
        return (_combined(settings, outputs[0], indexer_loss), *outputs[1:])
    if labelled:
        outputs["lm_loss"] = outputs.loss.detach()
        outputs["loss"] = _combined(settings, outputs.loss, indexer_loss)
        outputs["indexer_loss"] = indexer_loss.detach()
        if "log_probs" in outputs and "label_mask" in outputs:
            outputs["log_probs"] = _through_log_probs(total, outputs)
    else:
        outputs["indexer_loss"] = indexer_loss
    return outputs


def _through_log_probs(total: Tensor, outputs: Any) -> Tensor:
    """For TRL, which sums log_probs and divides by the labels of the whole batch, without outputs.loss.

    The values stay; the gradient of that sum holds the indexers' loss, by this call's share of the labels.
    """
    log_probs = outputs["log_probs"]
    part = -total.to(log_probs.device) * outputs["label_mask"].to(log_probs.dtype)
    return log_probs + (part - part.detach())


def _combined(settings: Settings, lm_loss: Tensor, indexer_loss: Tensor) -> Tensor:
    indexer_loss = indexer_loss.to(lm_loss.device)
    return indexer_loss if settings.mode == "warmup" else lm_loss + indexer_loss


def _total(losses: list[Tensor]) -> Tensor:
    return torch.stack([loss.to(losses[0].device) for loss in losses]).sum()


def _share(kwargs: dict[str, Any]) -> Tensor | float:
    """This call's part of the labels of the whole batch, where the caller divides by the whole batch's."""
    items, labels = kwargs.get("num_items_in_batch"), kwargs.get("labels")
    if items is None or labels is None:
        return 1.0
    shifted = kwargs.get("shift_labels")
    mine = (labels[..., 1:] if shifted is None else shifted) != -100
    return mine.sum() / (items.to(mine.device) if isinstance(items, Tensor) else items)
