"""Activation recompute: layers give their memory back and run again in the backward, on what the first pass chose.

    policy      runs again                                             kept for it
    selective   norms, MLA's up-projections, attention, the MLP        residual stream before and behind attention, what
                                                                       attention projects from hidden states
    full        the whole layer                                        residual stream before it

Either way the first pass keeps its selection, the experts it chose, and where an indexer learns what its loss found (a
gradient for each selected score): a replay chooses nothing, repeats no loss, and does not run an indexer that is fixed.
Everything kept belongs to one checkpoint of one part of one micro-batch and is gone with its graph. So forwards and
backwards may come in any order, and a forward that fails leaves nothing behind.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from dsattn.config import Recompute, StageConfig, TrainConfig
from dsattn.errors import InputError
from dsattn.nn.ranks import Ranks
from dsattn.nn.state import Part, Pass

R = TypeVar("R")
PARTS: dict[Recompute, tuple[Part, ...]] = {"none": (), "selective": ("attention", "mlp"), "full": ("layer",)}
# What `reuse_selection` keeps; the rest are products of selective recompute.
CHOSEN = ("selection", "loss", "experts", "expert_counts")
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten._scaled_mm.default)


@dataclass(frozen=True)
class Checkpoints:
    """A recompute policy, for `Pass.recompute`. Holds nothing of any forward.

    policy: `selective` or `full`. reuse_selection: replays use the first pass's selection and loss; without, they make
    both again, which gives the same gradients only where they come out the same: layers raise InputError unless they
    are deterministic.
    """

    policy: Recompute
    reuse_selection: bool = True

    def __post_init__(self) -> None:
        if self.policy not in PARTS:
            raise InputError(f"policy={self.policy!r} must be one of {', '.join(PARTS)}")

    def __call__(self, part: Part, function: Callable[..., R], run: Pass, *operands: Any) -> R:
        """`function(run, *operands)`, a layer's method, which a backward calls again where the policy names this part.

        Tensors in operands, the layout's too, are inputs of the checkpoint: gradients flow into them, and changing one
        before the backward is an error.
        """
        if part not in PARTS[self.policy] or not torch.is_grad_enabled():
            return function(run, *operands)
        stash = Stash(self.keeps)
        inside = dataclasses.replace(run, recompute=None, kept=stash)

        def again(*_: Tensor) -> R:
            if not stash.replaying:
                return function(inside, *operands)
            from dsattn.parallel.fsdp import whole  # torch's FSDP2 takes a second to import

            with whole(getattr(function, "__self__", None)):
                return function(dataclasses.replace(inside, probe=None), *operands)

        return checkpointed(stash, again, *tensors((run, operands)))

    def keeps(self, name: str) -> bool:
        """Whether checkpoints keep what is called `name`."""
        return self.reuse_selection if name in CHOSEN else self.policy == "selective"


def checkpointed(stash: "Stash", function: Callable[..., R], *inputs: Tensor, preserve_rng_state: bool = False) -> R:
    """`function(*inputs)`, which a backward calls again; `stash` knows which of the two passes runs.

    Changing an input before the backward is an error. preserve_rng_state: the replay draws the same random numbers.
    """
    if torch.compiler.is_compiling():
        raise InputError("recompute runs layers that are not compiled; compile what they call, or use policy 'none'")
    contexts = (_Phase(stash, replaying=False), _Phase(stash, replaying=True))
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": preserve_rng_state}
    return checkpoint(function, *inputs, context_fn=lambda: contexts, **options)


def checkpoints(train: TrainConfig) -> Checkpoints | None:
    """The policy that a training run asks for."""
    return None if train.recompute == "none" else Checkpoints(train.recompute, train.recompute_reuse_selection)


def learning_pass(stage: StageConfig, train: TrainConfig, rows: int, ranks: Ranks | None = None) -> Pass:
    """The pass of a training step. rows: real rows of the whole global batch. ranks: of the micro-batch."""
    balances = stage.mode != "warmup" and stage.balance_weight > 0
    return Pass(mode=stage.mode, kl_divisor=rows, with_balance=balances, recompute=checkpoints(train), ranks=ranks)


def tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in tuples, lists, dictionaries and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from tensors(one)
    elif dataclasses.is_dataclass(value):
        for item in dataclasses.fields(value):
            yield from tensors(getattr(value, item.name))


class Stash:
    """What one checkpoint keeps by value: `nn.state.Kept`. keeps: which names."""

    def __init__(self, keeps: Callable[[str], bool]):
        self.replaying = False
        self.keeps = keeps
        self._kept: dict[str, Any] = {}
        self._met: set[str] = set()

    def begin(self, *, replaying: bool) -> None:
        """A pass begins."""
        self.replaying = replaying
        self._met.clear()

    def holds(self, name: str) -> bool:
        """Whether this is a replay, and the first pass kept `name`."""
        return self.replaying and name in self._kept

    def value(self, name: str, make: Callable[..., R], *operands: Any) -> R:
        """`make(*operands)` of the first pass. Raises InputError where a pass comes by twice."""
        self._meet(name)
        if self.holds(name):
            return self._kept[name]
        made = make(*operands)
        if self.keeps(name):
            self._kept[name] = made
        return made

    def graph(self, name: str, make: Callable[..., Tensor], *operands: Any) -> Tensor:
        """`make(*operands)`, its products and losses those of the first pass. Raises InputError as `value` does."""
        self._meet(name)
        if not self.keeps(name) or (self.replaying and name not in self._kept):
            return make(*operands)
        results = self._kept[name] if self.replaying else []
        with _Products(results, self.replaying):
            made = make(*operands)
        if made.requires_grad:  # else nothing goes back through it, and it is cheap to make again
            self._kept[name] = results
        return made

    def _meet(self, name: str) -> None:
        if name in self._met:
            raise InputError(
                f"a layer runs twice inside one checkpoint: its {name} would be that of the first run; give each run a "
                "checkpoint of its own"
            )
        self._met.add(name)


class _Phase:
    """Tells a stash which pass runs; entered once more for each backward through a retained graph."""

    def __init__(self, stash: Stash, *, replaying: bool):
        self._stash, self._replaying = stash, replaying

    def __enter__(self) -> None:
        self._stash.begin(replaying=self._replaying)

    def __exit__(self, *_: object) -> None:
        pass


class _Products(TorchDispatchMode):
    """Writes the results of matrix products and of dsattn's operators to a list, or takes them from it, in order.

    Stands below autograd, which makes its graph in either case.
    """

    def __init__(self, results: list[Any], replaying: bool):
        super().__init__()
        self._results, self._replaying, self._next = results, replaying, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func not in PRODUCTS and func.namespace != "dsattn":
            return func(*args, **(kwargs or {}))
        if not self._replaying:
            made = func(*args, **(kwargs or {}))
            self._results.append(_detached(made))
            return made
        if self._next == len(self._results):
            raise InputError(f"the replay runs {func} once more than the first pass did; do not change the pass")
        self._next += 1
        return _detached(self._results[self._next - 1])


def _detached(results: Any) -> Any:
    """The same memory in new tensors: autograd writes its graph on the ones that it is given."""
    return results.detach() if isinstance(results, Tensor) else tuple(one.detach() for one in results)
