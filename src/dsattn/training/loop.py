"""The training loop: stages, steps, evaluations, checkpoints, and the ways a run may end early."""

import contextlib
import dataclasses
import math
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dsattn.accounting import model_work
from dsattn.accounting.place import local_model
from dsattn.config import RunConfig, StageConfig
from dsattn.errors import InputError, TrainingStopped
from dsattn.parallel.apply import apply
from dsattn.parallel.mesh import build_mesh
from dsattn.plan import prepare
from dsattn.training import checkpoint, consensus, plots, state
from dsattn.training.data import Pack, PackStream
from dsattn.training.evaluation import evaluate
from dsattn.training.feed import Feed, held_out
from dsattn.training.hardware import peak_tflops
from dsattn.training.metrics import Health, MetricsWriter, NoMetrics
from dsattn.training.report import Console, closing_table, write_report
from dsattn.training.runs import checkpoint_to_resume, init_weights, load_run, pick_device, write_json, writing
from dsattn.training.stages import audit, learning_rate, learns, make_optimizer, set_mode
from dsattn.training.step import Losses, accumulate_gradients
from dsattn.training.tokenizers import load_tokenizer

__all__ = ["Progress", "Trainer", "load_run", "train"]


def train(config: RunConfig, *, recipe: str | None = None, console: bool = True) -> dict[str, Any]:
    """Run every stage that is left and return what `summary.json` holds.

    Goes on from the newest checkpoint of `config.train.run_dir` where `resume` says so. SIGTERM or SIGINT saves and
    returns early with `finished` False. With many processes (`parallel.mesh.processes`) every one makes the same call:
    rank 0 prints and writes, and what one is asked or meets, all of them do. Raises TrainingStopped where a loss or
    gradient is not finite, CheckpointError where the folder cannot be written or a checkpoint cannot be read, DataError
    where text cannot be read, InputError where the folder holds another run.
    """
    return Trainer(config, recipe=recipe, console=console).run()


@dataclasses.dataclass
class Progress:
    """How far a run has come: what a checkpoint keeps beside weights, optimiser, random state and data position.

    step: optimiser steps done, over all stages. indexer_steps: those in which indexers learned. tokens: real rows.
    seconds: over all resumes. stages: one entry a finished stage, as in `summary.json`.
    """

    step: int = 0
    indexer_steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    stages: list[dict[str, Any]] = dataclasses.field(default_factory=list)


class Trainer:
    """One run. Construction reads the folder and the text; `run` trains."""

    def __init__(self, config: RunConfig, *, recipe: str | None = None, console: bool = True):
        plots.require()
        self.config, self.recipe = config, recipe
        self.run_dir = Path(config.train.run_dir)
        self.device = pick_device(config.train.device, "train.device")
        self.mesh = build_mesh(config.parallel, self.device)
        prepare(config, local_model(config.model, config.parallel))
        self.leads = consensus.rank() == 0
        on_gpu = self.device.type == "cuda"
        self.device_name = torch.cuda.get_device_name(self.device) if on_gpu else "cpu"
        self._peak_tflops = peak_tflops(self.device_name, config.train.dtype)
        self.resumed_from = consensus.on_first(lambda: checkpoint_to_resume(config))
        tokenizer = load_tokenizer(config.data.tokenizer)
        if tokenizer.vocab_size > config.model.vocab_size:
            raise InputError(
                f"model.vocab_size={config.model.vocab_size} must be at least {tokenizer.vocab_size}, "
                f"the ids of data.tokenizer={config.data.tokenizer!r}"
            )
        self.stream = consensus.together(lambda: PackStream(config.data, tokenizer, "train"))
        self.held_out: list[Pack] = []
        if config.data.held_out > 0:
            self.held_out = held_out(config.data, tokenizer, config.train.eval_packs)
        torch.manual_seed(config.train.seed)
        self.parallel = apply(config.model, self.mesh, config.train)
        self.model = self.parallel.model
        if self.resumed_from is None and config.train.init_from is not None:
            init_weights(self.model, config.train)
        self.progress = Progress()
        self.total_steps = sum(stage.steps for stage in config.train.stages)
        self.console = Console(console and self.leads, self.total_steps)
        self.feed = Feed(self.stream, skips=config.data.bad_documents == "skip", say=self.console.say)
        self.saving: checkpoint.Saving | None = None
        self.stop_asked = self.stopped = False  # this process by a signal; all of them by agreement
        self.saved_step = 0

    def run(self) -> dict[str, Any]:
        """Train what is left, then write summary and report."""
        consensus.on_first(self._open_folder)
        begin = checkpoint.load_meta(self.resumed_from)["stage"] if self.resumed_from else 0
        with contextlib.closing(self.console), self._stopping_on_signals():
            self._announce()
            self.metrics = MetricsWriter(self.run_dir, self.config.train.tensorboard) if self.leads else NoMetrics()
            with contextlib.closing(self.metrics):
                first = 0
                for index, stage in enumerate(self.config.train.stages):
                    if stage.steps and index >= begin and not self._stops():
                        self._run_stage(index, stage, first, resuming=index == begin and self.resumed_from is not None)
                    first += stage.steps
            self._finish_saving()
            summary = consensus.on_first(self._summarise)
        self.console.say(closing_table(summary))
        return summary

    def _open_folder(self) -> None:
        with writing(self.run_dir, "the run"):
            self.run_dir.mkdir(parents=True, exist_ok=True)
            write_json(self.run_dir / "config.json", self.config)

    def _announce(self) -> None:
        self.parameters = self.parallel.count_parameters()
        no_text = len(self.stream.passed_over)
        files = f"{len(self.stream.files)} training files" + (f"; {no_text} others are no text" if no_text else "")
        where = f"{self.device}" if consensus.size() == 1 else f"{consensus.size()} ranks of {self.device.type}"
        self.console.say(f"{self.parameters:,} parameters on {where}; {files}")

    def _run_stage(self, index: int, stage: StageConfig, first: int, *, resuming: bool) -> None:
        """The steps that are left of a stage that begins behind global step `first`."""
        set_mode(self.model, stage.mode)
        self.optimizer = make_optimizer(self.model, self.config.train, stage)
        if resuming:
            self._restore()
        last = first + stage.steps
        if self.progress.step >= last:
            return
        self.console.audit(audit(self.parallel, stage.mode))
        clock = time.monotonic() - self.progress.seconds
        while self.progress.step < last and not self._stops():
            started = time.monotonic()
            count = stage.packs_per_step or self.config.train.packs_per_step
            packs = self.feed.take(count, stop=self.stop_asked)
            if packs is None:  # some rank was asked
                self.stopped = True
                break
            lr = learning_rate(stage, self.progress.step - first)
            losses, facts = self._step(packs, stage, lr)
            self.progress.step += 1
            self.progress.tokens += losses.rows
            self.progress.indexer_steps += learns(stage.mode)[1]
            self.progress.seconds = time.monotonic() - clock
            took = time.monotonic() - started
            speed = self._speed(losses.rows, facts.pop("flops"), took)
            self._log(index, stage, losses, {"lr": lr, **facts, **speed})
            done = self.progress.step == last
            if done or self.progress.step % self.config.train.eval_every == 0:
                self._evaluate(index, stage, done)
            if done or self.progress.step % self.config.train.save_every == 0:
                self._save(index)
        if self.saved_step != self.progress.step:  # asked to stop between two checkpoints
            self._save(index)

    def _stops(self) -> bool:
        return self.stopped or (self.stop_asked and consensus.size() == 1)

    def _speed(self, rows: int, flops: float, seconds: float) -> dict[str, float | None]:
        rate, peak = flops / seconds / 1e12, self._peak_tflops
        mfu = rate / (peak * consensus.size()) if peak else None
        return {"tokens_per_second": rows / seconds, "tflops": rate, "mfu": mfu}

    def _step(self, packs: list[Pack], stage: StageConfig, lr: float) -> tuple[Losses, dict[str, float]]:
        """One optimiser step; returns its losses, the norm of its gradient before clipping, and its FLOPs."""
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        losses = accumulate_gradients(self.parallel, packs, stage, self.config.train)
        grad_norm = self.parallel.clip_gradients(self.config.train.grad_clip)
        self._check_finite(losses, grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        if learns(stage.mode)[0] and stage.router_bias_rate > 0:
            self.model.move_routing_biases(losses.loads, stage.router_bias_rate)
        lengths = [length for pack in packs for length in pack.layout.lengths]
        return losses, {"grad_norm": grad_norm, "flops": model_work(self.config.model, lengths, stage.mode).flops}

    def _check_finite(self, losses: Losses, grad_norm: float) -> None:
        values = losses.named() | {"the gradient's norm": grad_norm}
        wrong = [f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)]
        parallel = self.config.parallel
        # Ranks of tp with the same rows make their losses each: the others do not see what went wrong on one.
        if parallel.tp > 1 and not parallel.sequence_parallel and consensus.most([bool(wrong)])[0] and not wrong:
            wrong = ["a number of another tensor-parallel rank is not finite"]
        if wrong:
            raise TrainingStopped(
                f"step {self.progress.step + 1}: {', '.join(wrong)}. That step changed no weight; the last good "
                f"checkpoint is {checkpoint.latest(self.run_dir) or 'none'}. Lower the learning rate, or look at the "
                "text there"
            )

    def _log(self, index: int, stage: StageConfig, losses: Losses, facts: dict[str, Any]) -> None:
        step = self.progress.step
        self.console.step(step, stage.mode, losses.lm, losses.kl_mean, facts["tokens_per_second"])
        if step % self.config.train.log_every == 0 or step == 1:
            head = {"kind": "train", "step": step, "stage": index, "mode": stage.mode}
            loss = {"lm_loss": losses.lm, "mtp_losses": list(losses.mtp) or None}
            loss |= {"kl": losses.kl_mean, "kl_layers": losses.kl or None}
            loss |= {"balance_loss": losses.balance, "expert_max_violation": losses.max_violation}
            loss |= {"rank_imbalance": losses.rank_imbalance}
            self.metrics.write({**head, **loss, **facts, "seconds": self.progress.seconds})

    def _evaluate(self, index: int, stage: StageConfig, done: bool) -> None:
        """Held-out loss in the stage's own mode, and the indexers' health once they have begun to learn."""
        loss: float | None = None
        health: Health | None = None
        if self.held_out:
            loss, health = evaluate(self.parallel, self.held_out, stage, self.config.train)
        measured = None if health is None else health.to_dict()
        head = {"kind": "eval", "step": self.progress.step, "stage": index, "mode": stage.mode}
        self.metrics.write({**head, "lm_loss": loss, "health": measured, "seconds": self.progress.seconds})
        if done:
            entry = {"mode": stage.mode, "steps": stage.steps, "held_out_loss": loss, "health": measured}
            before = self.progress.stages[:index]  # without this stage itself, which a resumed run may have made longer
            self.progress.stages = [*before, {**entry, "seconds": self.progress.seconds}]

    def _save(self, index: int) -> None:
        tree = {
            **state.capture(self.model, self.optimizer),
            "rng": state.rng_state(),
            "data": self.stream.state_dict(),
            "progress": dataclasses.asdict(self.progress),
        }
        config = dataclasses.asdict(self.config)
        meta = {"config": config, "stage": index, "indexer_steps": self.progress.indexer_steps, "recipe": self.recipe}
        keep, wait = self.config.train.keep_checkpoints, not self.config.train.async_save
        self._finish_saving()
        self.saving = checkpoint.begin_save(self.run_dir, self.progress.step, tree, keep=keep, meta=meta, wait=wait)
        self.saved_step = self.progress.step

    def _finish_saving(self) -> None:
        saving, self.saving = self.saving, None
        if saving is not None:
            saving.result()

    def _restore(self) -> None:
        assert self.resumed_from is not None
        rest = {"rng": None, "data": None, "progress": None}
        rest = state.restore(self.resumed_from, self.model, self.optimizer, rest)
        self.progress = Progress(**rest["progress"])
        self.saved_step = self.progress.step
        self.stream.load_state_dict(rest["data"])
        state.set_rng_state(rest["rng"])
        self.metrics.resume_from(self.progress.step)
        self.console.say(f"going on from {self.resumed_from}: step {self.progress.step} of {self.total_steps}")
        self.console.start_at(self.progress.step)

    @contextlib.contextmanager
    def _stopping_on_signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT end the run after the current step, with a checkpoint; a second SIGINT at once."""

        def ask(number: int, _: Any) -> None:
            if number == signal.SIGINT and self.stop_asked:
                raise KeyboardInterrupt
            self.stop_asked = True

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _summarise(self) -> dict[str, Any]:
        """Write `summary.json` and `report.html`."""
        newest, on_gpu = checkpoint.latest(self.run_dir), self.device.type == "cuda"
        summary = {
            "recipe": self.recipe,
            "device": self.device_name,
            "torch": torch.__version__,
            "peak_bytes": torch.cuda.max_memory_allocated(self.device) if on_gpu else None,
            "parameters": self.parameters,
            "seconds": self.progress.seconds,
            "tokens": self.progress.tokens,
            "stages": self.progress.stages,
            "checkpoint": str(newest) if newest else None,
            "report": str(self.run_dir / "report.html"),
            "metrics": str(self.run_dir / "metrics.jsonl"),
            "finished": self.progress.step >= self.total_steps,
        }
        with writing(self.run_dir, "summary and report"):
            write_json(self.run_dir / "summary.json", summary)
            write_report(self.run_dir)
        return summary
