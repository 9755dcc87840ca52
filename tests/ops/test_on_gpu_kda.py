"""fla-core's KDA kernels on a GPU, and the linear layer on them, against the plain-torch oracle in fp64.

Documents around the kernels' chunks of 64 rows, one-token ones between them; each test prints its errors.
"""

import copy
import math
import sys

import pytest
import torch
from torch import Tensor

from dsattn.config import KDAConfig
from dsattn.keys import Layout
from dsattn.nn.linear_attention import KDASelfAttention
from dsattn.ops.kda import kimi_delta_attention

LENGTHS = (1, 63, 64, 1, 65, 200)
HEADS, WIDTH, HIDDEN = 4, 128, 256
LIMITS = {torch.bfloat16: 3e-2, torch.float32: 1e-2}  # of a norm; fp32 is multiplied in TF32

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.filterwarnings("ignore"),  # fla warns of packages that it would like to have
]


def shared_memory(config) -> tuple[int, int, int]:
    """Orders configurations by what they need of it: blocks, stages, and warps, whose products change at four."""
    blocks = math.prod(size for size in config.kwargs.values() if isinstance(size, int))
    return blocks, config.num_stages, abs(config.num_warps - 2)


@pytest.fixture(autouse=True, scope="module")
def untuned():
    """One configuration of each of fla's kernels: tuning them takes minutes, and all that fit should be right.

    In fp32 some do not fit, which fla's own tuning skips; the smallest does.
    """
    pytest.importorskip("fla.ops.kda", reason="needs fla-core and einops")
    from triton.runtime.autotuner import Autotuner

    for name, module in list(sys.modules.items()):
        for one in vars(module).values() if name.startswith("fla.") else ():
            while one is not None:
                if isinstance(one, Autotuner):
                    one.configs = [min(one.configs, key=shared_memory)]
                one = getattr(one, "fn", None)


def far(got: Tensor, exact: Tensor) -> float:
    """Distance by the exact norm; inf where anything is not finite."""
    return ((got.double() - exact).norm() / exact.norm()).item() if got.isfinite().all() else torch.inf


def check(what: str, errors: dict[str, float], limit: float, capsys) -> None:
    with capsys.disabled():
        sys.stdout.write(f"\n{what}: " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items()) + "\n")
    assert {name: error for name, error in errors.items() if not error < limit} == {}


def run(backend: str, dtype: torch.dtype, given: list[Tensor], lengths, bounded: bool) -> dict[str, Tensor]:
    """Results and gradients by name. q, k and v are in `dtype`, the rest in fp32 at least."""
    wide = torch.promote_types(dtype, torch.float32)
    names = ("q", "k", "v", "decay", "beta", "state")[: len(given)]
    leaves = [x.to(dtype if i < 3 else wide).requires_grad_() for i, x in enumerate(given)]
    state = leaves[5] if len(leaves) > 5 else None
    out, last = kimi_delta_attention(*leaves[:5], lengths, state=state, bounded=bounded, backend=backend)
    generator = torch.Generator("cuda").manual_seed(1)
    loss = sum((x.double() * torch.randn(x.shape, device="cuda", generator=generator)).sum() for x in (out, last))
    learned = torch.autograd.grad(loss, leaves)
    return {"out": out, "last": last} | {f"d{name}": x for name, x in zip(names, learned, strict=True)}


@pytest.mark.parametrize(
    ("dtype", "bounded", "with_state"),
    [(torch.bfloat16, True, False), (torch.bfloat16, False, True), (torch.float32, True, True)],
    ids=["bf16", "bf16-unbounded-state", "fp32-state"],
)
def test_kernels_equal_the_oracle(dtype, bounded, with_state, capsys):
    rows = sum(LENGTHS)
    q, k, v = torch.randn(3, rows, HEADS, WIDTH, device="cuda").to(dtype)
    given = [q, k, v, -5 * torch.rand(rows, HEADS, WIDTH, device="cuda") ** 4, torch.rand(rows, HEADS, device="cuda")]
    if with_state:
        given.append(torch.randn(len(LENGTHS), HEADS, WIDTH, WIDTH, device="cuda"))
    got, exact = run("fla", dtype, given, LENGTHS, bounded), run("reference", torch.float64, given, LENGTHS, bounded)
    assert got["out"].dtype == dtype
    assert got["last"].dtype == torch.float32
    errors = {name: far(x, exact[name]) for name, x in got.items()}
    check(f"kda {dtype}, bounded {bounded}", errors, LIMITS[dtype], capsys)
    if not with_state:  # a pack without resets would be seen
        leaky = run("reference", torch.float64, given, [rows], bounded)
        assert far(leaky["out"], exact["out"]) > 3 * LIMITS[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_the_layer_equals_the_oracle(dtype, capsys):
    """In bf16 as training runs it: fp32 parameters and stream under autocast. NaN in padding, an empty document."""
    layout = Layout.packed([*LENGTHS, 0, 5], padded=[*LENGTHS, 3, 8], total=sum(LENGTHS) + 13).to("cuda")
    real = layout.real_rows[:, None]
    layer = KDASelfAttention(HIDDEN, KDAConfig(heads=HEADS, head_dim=WIDTH, backend="fla")).cuda()
    oracle = copy.deepcopy(layer).double()
    oracle.config = KDAConfig(heads=HEADS, head_dim=WIDTH, backend="reference")
    hidden, grad = (torch.randn(len(real), HIDDEN, device="cuda") for _ in range(2))
    found = []
    for module, wide in ((layer, torch.float32), (oracle, torch.float64)):
        x = hidden.to(wide).masked_fill(~real, torch.nan).requires_grad_()
        half = dtype == torch.bfloat16 and module is layer
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            out = module(x, layout).hidden
        assert not out.masked_select(~real).any()
        (out.to(wide) * grad).sum().backward()
        learned = {name: p.grad for name, p in module.named_parameters()}
        found.append({"out": out.detach(), "dhidden": x.grad} | learned)
    got, exact = found
    check(f"kda layer {dtype}", {name: far(got[name], one) for name, one in exact.items()}, LIMITS[dtype], capsys)
