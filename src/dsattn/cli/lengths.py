"""Cost of a token against document length, for `dsattn flops`: a table, and a picture."""

from typing import Any

from dsattn.accounting.lengths import crossover, flops_per_token, variants
from dsattn.cli.tables import amount, table
from dsattn.config import Mode, ModelConfig
from dsattn.training.plots import COLOURS, Picture, draw_picture

LENGTHS = tuple(2**power for power in range(10, 21))
_LOOKS = ("-", "--", "-.")


def costs(config: ModelConfig, mode: Mode) -> dict[str, Any]:
    """FLOPs of a training step a token, by variant and length, and from which length on each beats dense attention."""
    found = variants(config, mode)
    dense = found["dense"]
    return {
        "lengths": list(LENGTHS),
        "flops_per_token": {name: [flops_per_token(*one, length) for length in LENGTHS] for name, one in found.items()},
        "crossover": {name: crossover(one, dense) for name, one in found.items() if one is not dense},
    }


def cost_table(found: dict[str, Any]) -> str:
    """A row a length, and a line a crossover."""
    lines = found["flops_per_token"]
    rows = [
        [f"{length:,}", *(amount(lines[name][at], "FLOP") for name in lines)]
        for at, length in enumerate(found["lengths"])
    ]
    said = [
        f"{name}: "
        + ("dense attention stays cheaper" if at is None else f"fewer FLOPs than dense from {at:,} tokens on")
        for name, at in found["crossover"].items()
    ]
    return "\n".join([table(["one document of", *lines], rows), *said])


def picture(name: str, found: dict[str, Any]) -> Picture:
    """Lines over length, both axes logarithmic, crossovers marked. Raises InputError where matplotlib is missing."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        lines = found["flops_per_token"]
        for (label, costs), colour, look in zip(lines.items(), COLOURS, _LOOKS, strict=False):
            axes.plot(found["lengths"], [cost / 1e9 for cost in costs], look, color=colour, label=label)
            at = found["crossover"].get(label)
            if at is not None and found["lengths"][0] <= at <= found["lengths"][-1]:
                axes.axvline(at, color=colour, linewidth=0.8, linestyle=":")
                axes.annotate(
                    f"{at:,}", (at, 1), xycoords=("data", "axes fraction"), color=colour, va="top", fontsize=8
                )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("tokens of a document")
        axes.set_ylabel("GFLOP a token, forward and backward")
        axes.set_title(name)
        axes.legend(loc="upper left")

    crossed = ", ".join(f"{label} from {at:,} tokens" for label, at in found["crossover"].items() if at is not None)
    alt = f"Lines of the cost of a token over document length for {name}. Cheaper than dense: {crossed or 'nowhere'}."
    return draw_picture(draw, 4.4, alt)
