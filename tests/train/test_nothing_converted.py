"""Where no matmul of a graph is in FP8, nothing of it is rounded unless option save or a plan asks for it: gradients
are those of torch.compile, bit by bit. The warning says which of both it is."""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fake_quantized import sqnr
from models import ZOO
from pipelines import add_pass
from saving import Step, is_fp8, noise, rows, same_bits, step
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.compile_fx import compile_fx
from torch.utils.checkpoint import checkpoint

import fp8compile
from fp8compile.errors import Fp8Warning
from fp8compile.passes.core.stages import Stage
from fp8compile.passes.save.saved_forms import NOTHING_IN_FP8

# Kernels of Inductor: generated ones keep in FP32 what BF16 rounds between operators.
EAGER = {"executor": "eager", "strict": True, "select": "all", "save_min_bytes": 0, "kernels": "inductor"}
D, INNER = 64, 128


def plain(gm: fx.GraphModule, inputs: Any) -> Any:
    """torch.compile without anything of ours, the graphs that it hands to Inductor run node by node."""

    def run_eagerly(half: fx.GraphModule, inputs: Any, **settings: Any) -> Any:
        return make_boxed_func(half.forward)

    return compile_fx(gm, inputs, inner_compile=run_eagerly, config_patches={"fallback_random": True})


class Mlp(nn.Module):
    """Two residual blocks, or one; `around` is applied to each: a checkpoint, for instance."""

    def __init__(self, dropout: float = 0.0, around: Any = None, breaks: bool = False, blocks: int = 2) -> None:
        super().__init__()
        self.norm = nn.ModuleList(nn.LayerNorm(D) for _ in range(blocks))
        self.up = nn.ModuleList(nn.Linear(D, INNER) for _ in range(blocks))
        self.down = nn.ModuleList(nn.Linear(INNER, D) for _ in range(blocks))
        self.dropout, self.breaks = dropout, breaks
        self.around = around or (lambda run, *args: run(*args))

    def block(self, n: int, x: Tensor) -> Tensor:
        wide = F.dropout(F.gelu(self.up[n](self.norm[n](x))), self.dropout)
        return x + self.down[n](wide)

    def forward(self, x: Tensor) -> Tensor:
        x = self.around(lambda x: self.block(0, x), x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.around(lambda x: self.block(1, x), x) if len(self.up) > 1 else x


def model(dtype: torch.dtype = torch.bfloat16, **kwargs: Any) -> Mlp:
    torch.manual_seed(0)
    return Mlp(**kwargs).to(dtype)


def run(mlp: nn.Module, **options: Any) -> tuple[Step, list[str]]:
    """A step compiled with `options` (none: by torch alone), and the warnings of ours."""
    torch.compiler.reset()
    fp8 = {"backend": "fp8", "options": EAGER | options} if options else {"backend": plain}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = step(mlp, torch.compile(mlp, **fp8), [noise(4, 32, D, dtype=next(mlp.parameters()).dtype)])
    return found, [str(w.message) for w in caught if w.category is Fp8Warning]


@functools.cache
def plain_step(dtype: torch.dtype = torch.bfloat16) -> Step:
    """The step of one block compiled by torch alone, made once."""
    return run(model(dtype, blocks=1))[0]


@dataclass(frozen=True)
class Ran:
    """A step of one block, the warnings of ours, its plan and what is shown of it, and what it keeps for backward."""

    step: Step
    warnings: list[str]
    plan: fp8compile.Plan
    shown: str
    rows: list[Any]

    @property
    def rounded(self) -> list[Any]:
        return [row for row in self.rows if is_fp8(row)]


_ran: dict[str, Ran] = {}


def once(dtype: torch.dtype = torch.bfloat16, **options: Any) -> Ran:
    """The step of one block compiled with `options`, made once."""
    key = repr((dtype, options))
    if key not in _ran:
        found, told = run(model(dtype, blocks=1), **options)
        _ran[key] = Ran(found, told, fp8compile.compiles()[-1], str(fp8compile.last_compile()), rows())
    return _ran[key]


def under_checkpoint(function: Any, *args: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=False)


# ---- the default rounds nothing -------------------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "skip": {"skip": "*"},
    "the cost model": {"select": "profitable"},
    "recipe": {"recipe": {"output": None, "grad_input": None, "grad_weight": None}},
    "operations": {"operations": "convolution"},
    "auto": {"skip": "*", "save": "auto"},
    "a budget": {"skip": "*", "activation_budget": 1.0},
    "a small budget": {"skip": "*", "activation_budget": 0.5},
    "bf16 by pattern": {"skip": "*", "save": {"up": "bf16"}},
}


@pytest.mark.parametrize(
    ("way", "dtype"),
    [(way, torch.bfloat16) for way in WAYS] + [(way, torch.float32) for way in ("skip", "a budget")],
    ids=str,
)
def test_gradients_are_those_of_torch_compile(way: str, dtype: torch.dtype):
    got = once(dtype, **WAYS[way])
    assert got.rows
    assert not got.rounded
    assert same_bits(got.step, plain_step(dtype))


def test_generated_kernels_add_no_noise():
    exact = once(torch.float32, skip="*", kernels="generated").step
    assert same_bits(exact, plain_step(torch.float32))
    wide, _ = run(model(blocks=1).float(), skip="*")
    got, usual = once(skip="*", kernels="generated").step, plain_step()
    # The same roundings to BF16 but those that they leave out; of few values the noise scatters.
    assert not [name for name in usual if sqnr(wide[name], got[name]) < sqnr(wide[name], usual[name]) - 1.5]


@pytest.mark.parametrize(
    "kwargs",
    [{"dropout": 0.3, "blocks": 1}, {"around": under_checkpoint, "blocks": 1}, {"breaks": True}],
    ids=lambda kwargs: next(iter(kwargs)),
)
def test_so_they_are_with_dropout_checkpoints_and_graph_breaks(kwargs: dict[str, Any]):
    assert same_bits(run(model(**kwargs), skip="*")[0], run(model(**kwargs))[0])


@pytest.mark.parametrize("name", ["llama", "cnn", "autocast"])
def test_so_they_are_in_models_of_the_zoo(name: str):
    found = []
    for options in ({"backend": plain}, {"backend": "fp8", "options": EAGER | {"skip": "*", "fold_masks": False}}):
        torch.compiler.reset()
        torch.manual_seed(0)
        case = ZOO[name]()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Fp8Warning)
            case.loss(torch.compile(case.model, **options)(**case.inputs)).backward()
        found.append({name: p.grad for name, p in case.model.named_parameters() if p.grad is not None})
    assert same_bits(*found)


def test_the_plan_says_why_a_value_keeps_its_precision():
    assert {row.reason for row in once(skip="*").rows if "up" in row.path} == {NOTHING_IN_FP8.text}


def test_a_graph_whose_pass_fails_is_not_rounded_either(monkeypatch: pytest.MonkeyPatch):
    def broken(c: Any) -> None:
        raise ValueError("a pass that fails")

    add_pass(monkeypatch, Stage.JOINT, "broken", broken, first=True)
    got, (warning,) = run(model(blocks=1), strict=False)
    assert "This graph is compiled without FP8" in warning
    assert same_bits(got, plain_step())


# ---- where FP8 matmuls are, and where it is asked for ---------------------------------------------------------------


def test_one_matmul_in_fp8_is_enough_to_round():
    run(model(), skip=["up", "down.0"])
    assert [row for row in rows() if is_fp8(row) and "0" in row.path]


def test_each_graph_decides_by_itself():
    run(model(breaks=True), skip=["up.0", "down.0"])
    first, second = fp8compile.compiles()
    assert {m.decision for m in first.matmuls} == {"bf16"}
    assert not [row for row in first.saved if is_fp8(row)]
    assert {m.decision for m in second.matmuls} == {"fp8"}
    assert [row for row in second.saved if is_fp8(row)]


def test_a_graph_counts_the_regions_that_it_calls():
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp, self.last = model(), nn.Linear(D, D, dtype=torch.bfloat16)
            self.region = torch.compiler.nested_compile_region(lambda x: self.mlp.block(0, x))

        def forward(self, x: Tensor) -> Tensor:
            return self.last(F.gelu(self.region(F.gelu(x * x))))

    torch.manual_seed(0)
    run(Nested(), skip=["last"])
    decisions = [{m.decision for m in plan.matmuls} for plan in fp8compile.compiles()]
    assert decisions == [{"fp8", "bf16"}]
    assert [row for row in rows() if is_fp8(row)]


@pytest.mark.parametrize("save", ["fp8", {"*": "fp8"}, {"up": "fp8", "norm": "fp8"}], ids=str)
def test_what_option_save_names_is_rounded_all_the_same(save: Any):
    got = once(skip="*", save=save)
    (warning,), rounded = got.warnings, got.rounded
    assert rounded
    assert f" {len(rounded)} of {len(got.plan.saved)} tensors saved for backward are rounded" in warning
    assert "as option save or a plan says; without that nothing is rounded." in warning
    assert not same_bits(got.step, plain_step())
    if isinstance(save, dict) and "*" not in save:
        assert {row.path.split(".")[0] for row in rounded} <= {"up", "norm"}


def test_a_level_is_no_such_name():
    assert not once(skip="*", level="O3").rounded
    assert once(level="O3").rounded


def test_a_plan_names_it():
    plan = once(select="all").plan
    kept = replace(plan, matmuls=[replace(m, decision="bf16", left=None, right=None) for m in plan.matmuls], saved=[])
    run(model(blocks=1), plan=kept)
    assert not [row for row in rows() if is_fp8(row)]
    rounding = replace(kept, saved=once(skip="*", save="fp8").plan.saved)
    run(model(blocks=1), plan=rounding)
    assert [row for row in rows() if is_fp8(row)]


# ---- what is said ---------------------------------------------------------------------------------------------------


def test_the_warning_says_that_nothing_is_rounded():
    (warning,) = once(skip="*").warnings
    assert warning == (
        "fp8: NOTHING was converted in a graph with 6 matmuls: 6× skip='*'. What is saved for backward keeps its "
        "precision, so that nothing is rounded."
    )


def test_of_inference_it_says_nothing_of_what_is_saved():
    with torch.no_grad(), pytest.warns(Fp8Warning) as caught:
        torch.compile(model(blocks=1), backend="fp8", options=EAGER | {"skip": "*"})(noise(4, 32, D))
    assert [str(w.message) for w in caught if w.category is Fp8Warning] == [
        "fp8: NOTHING was converted in a graph with 2 matmuls: 2× skip='*'."
    ]


@pytest.mark.filterwarnings("error::fp8compile.errors.Fp8Warning")
def test_a_batch_without_rows_is_not_warned_of():
    run = torch.compile(nn.Linear(D, D), backend="fp8", options=EAGER)
    assert run(torch.randn(32, D)).shape == (32, D)
    assert run(torch.randn(0, D)).shape == (0, D)


def test_a_table_says_whether_it_is_rounded():
    assert "rounded to FP8 though no matmul is in it" in " ".join(once(skip="*", save="fp8").shown.split())
    assert "though no matmul" not in once(skip="*").shown
    assert "though no matmul" not in once(select="all").shown


def test_masks_are_told_all_the_same():
    qkv = nn.Linear(D, 3 * D, dtype=torch.bfloat16)

    def attention(x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in qkv(x).chunk(3, -1))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, k, v, mask)

    with pytest.warns(Fp8Warning, match="NOTHING was converted"):
        torch.compile(attention, backend="fp8", options=EAGER | {"skip": "*"})(noise(4, 32, D))
    assert fp8compile.compiles()[-1].masks
