"""Whole models: an FP8 training step against BF16 eager, and against a fake-quantized eager step of the recipe."""

from __future__ import annotations

import copy
import functools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from fake_quantized import RECIPES, fake_quantized, sqnr
from models import BATCH, LENGTH, WIDTH, ZOO, Blocks, Case, blocks, next_token, noise, squared_error, tokens
from torch import Tensor, nn
from two_ways import two_ways

import fp8compile
from fp8compile.plan import store

# dB, of every gradient and of the output. A cast to E4M3 keeps about 31 dB and one to E5M2 25 dB; a matmul has two, and
# a gradient of these models has passed some ten matmuls, whose noise adds up: 31 - 10 log10(20) = 18; 3 are for what
# nonlinearities do to it.
LEAST = {"mixed": 15.0, "rowwise": 15.0, "tensorwise": 12.0, "blockwise": 15.0}
# Twice the noise of the fake-quantized step: 3 dB. Merged matmuls share a scale where separate ones have one each.
SLACK = 2.0
# Draws of that noise. A gradient of 64 elements has few degrees of freedom, and single draws lie 2 dB up and down.
DRAWS = 4
# A gradient which BF16 itself gets wrong by more than this is zero but for rounding (a key's bias under softmax).
CONDITIONED = 25.0
HEAD = "the output head (lm_head=True converts it)"

# The default recipe for every model (qwen2 is a llama with biases, and whisper a T5 behind convolutions, as others
# have), each other one for every kind.
CASES = [(name, "mixed") for name in ZOO if name not in ("qwen2", "whisper")]
CASES += [(name, "rowwise") for name in ("mixtral", "tied_weights")]
CASES += [(name, "tensorwise") for name in ("cnn", "shared_module")]
CASES += [("llama", "blockwise"), ("mlp", "blockwise")]


OUTPUT = "(the output)"
Step = dict[str, Tensor]  # what a training step gives: the output under OUTPUT, and the gradients by parameter


def train_step(case: Case, run: Callable[..., Any]) -> Step:
    """Forward and backward of `run`, which is the case's model in some form."""
    case.model.zero_grad(set_to_none=True)
    out = run(**case.inputs)
    case.loss(out).backward()
    gradients = {name: p.grad.clone() for name, p in case.model.named_parameters() if p.grad is not None}
    return gradients | {OUTPUT: _tensor(out).detach().clone()}


def _tensor(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else out.logits


@dataclass(frozen=True)
class Reference:
    """The BF16 step of a case, and by how much BF16 errs (noise over signal) in what it gets right at all."""

    case: Case
    bf16: Step
    noise: dict[str, float]

    @staticmethod
    def of(case: Case) -> Reference:
        bf16, exact = train_step(case, case.model), _exact_step(case)
        decibels = {name: sqnr(exact[name], value) for name, value in bf16.items()}
        return Reference(case, bf16, {name: _ratio(db) for name, db in decibels.items() if db >= CONDITIONED})

    def limits(self, recipe: str) -> dict[str, float]:
        """The least dB for each tensor: the recipe's bound, or what a fake-quantized step reaches within SLACK.

        Two steps with their own BF16 roundings differ by the noise of both, which matters at 40 dB and more. The error
        of n elements, a sum of n squares, scatters by √(2/n): two of these are allowed.
        """
        drawn: dict[str, float] = dict.fromkeys(self.noise, 0.0)
        for draw in range(DRAWS):
            with fake_quantized(recipe, self.case.left_weights(), headroom=2 ** (draw / DRAWS)) as replaced:
                fake = train_step(self.case, self.case.model)
            assert replaced, "the reference must have matmuls to replace"
            for name in drawn:
                drawn[name] += _ratio(sqnr(self.bf16[name], fake[name])) / DRAWS
        allowed = {name: SLACK * drawn[name] + 2 * noise for name, noise in self.noise.items()}
        scatter = {name: 10 * math.log10(1 + 2 * math.sqrt(2 / self.bf16[name].numel())) for name in self.noise}
        return {name: max(LEAST[recipe], -10 * math.log10(ratio)) - scatter[name] for name, ratio in allowed.items()}

    def check(self, got: Step, recipe: str) -> None:
        """The step `got` has the dtypes of the BF16 step, and enough dB in all that BF16 gets right."""
        assert {name: value.dtype for name, value in got.items()} == {n: v.dtype for n, v in self.bf16.items()}
        limits = self.limits(recipe)
        found = {name: sqnr(self.bf16[name], got[name]) for name in limits}
        bad = [f"{n}: {found[n]:.1f} dB, needs {limit:.1f}" for n, limit in limits.items() if not found[n] >= limit]
        assert not bad, "\n".join(bad)


def _ratio(decibels: float) -> float:
    return 10 ** (-decibels / 10)


def _exact_step(case: Case) -> Step:
    """The same step in FP32."""
    inputs = {k: v.float() if v.is_floating_point() else v for k, v in case.inputs.items()}
    exact = Case(copy.deepcopy(case.model).float(), inputs, case.loss, 0)
    for module in exact.model.modules():
        if isinstance(module, Blocks):
            module.autocast = False
    return train_step(exact, exact.model)


@functools.cache
def reference(name: str) -> Reference:
    """The reference of a model of the zoo, made once."""
    return Reference.of(ZOO[name]())


def compiled(model: nn.Module, recipe: str = "mixed", skip: tuple[str, ...] = ()) -> Callable[..., Any]:
    """The model with every matmul in FP8, run operator by operator (regions by their reference)."""
    options = {"recipe": recipe, "select": "all", "executor": "eager", "strict": True, "skip": skip}
    return torch.compile(model, backend="fp8", options=options)


def converted() -> int:
    """FP8 matmuls of all graphs compiled so far, a merged one for as many as it took in."""
    return sum(map(converted_in, fp8compile.compiles()))


def converted_in(plan: fp8compile.Plan) -> int:
    return sum(max(1, len(row.merged)) for row in plan.converted)


def same_bits(a: Step, b: Step) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@functools.cache
def trained(name: str, recipe: str) -> tuple[Step, list[fp8compile.Plan]]:
    """The compiled step of a model of the zoo, and its plans, made once."""
    if name in BLOCKS and recipe == "mixed":
        _, step, plans = both_ways(BLOCKS[name])
        return step, plans
    store.reset()
    case = reference(name).case
    return train_step(case, compiled(case.model, recipe, case.skip)), fp8compile.compiles()


@pytest.mark.parametrize(("name", "recipe"), CASES, ids=[f"{n}-{r}" for n, r in CASES])
def test_step_matches_bf16_and_fake_quantized(name: str, recipe: str) -> None:
    ref = reference(name)
    assert OUTPUT in ref.noise
    assert len(ref.noise) >= 0.75 * len(ref.bf16), "a model whose gradients are mostly noise shows nothing"
    got, plans = trained(name, recipe)
    assert sum(map(converted_in, plans)) == ref.case.matmuls
    ref.check(got, recipe)
    check_reasons(ref.case, plans)


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_linear_is_the_fake_quantized_one(recipe: str) -> None:
    linear = nn.Linear(80, 144).bfloat16()
    x, gradient = noise(40, 80), noise(40, 144, seed=3) * 2.0**-10  # M, N, K are all to be padded somewhere

    def step(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        given = x.clone().requires_grad_()
        out = run(given)
        return [out, *torch.autograd.grad(out, [given, linear.weight, linear.bias], gradient)]

    with fake_quantized(recipe):
        fake = step(linear)
    got = step(compiled(linear, recipe))
    assert converted() == (2 if recipe == "rowwise_with_gw_hp" else 3)
    for want, have in zip(fake, got, strict=True):
        # equal payloads and scales, FP32 sums in another order: here and there a BF16 rounding of 2^-8 falls elsewhere
        assert sqnr(want, have) >= 55


def check_reasons(case: Case, plans: list[fp8compile.Plan]) -> None:
    """Whether every matmul that was left has its reason."""
    reasons = sum((plan.reasons() for plan in plans), Counter())
    # three for each linear layer that is skipped, and for the head
    expected = dict(case.kept)
    expected |= {f"skip={pattern!r}": 3 * _matching(case.model, pattern) for pattern in case.skip}
    expected |= {HEAD: 3} if case.heads else {}
    if torch.__version__ < "2.13":  # there a scan over time stays as many small matmuls as it has steps
        scans = "neither operand comes from an nn.Parameter"
        assert reasons.pop(scans, 0) >= expected.pop(scans, 0)
    assert reasons == expected


def _matching(model: nn.Module, pattern: str) -> int:
    return sum(name.endswith(f".{pattern}") for name, _ in model.named_modules())


BLOCKS = {"checkpoint": "checkpointed", "graph_break": "broken"}  # models of the zoo that are `Blocks` of a kind


@functools.cache
def both_ways(kind: str = "") -> tuple[Step, Step, list[fp8compile.Plan]]:
    """A step of `Blocks` without regions and with them, compiled once; and the plans."""
    store.reset()
    case = blocks(**({kind: True} if kind else {}))
    run, steps = compiled(case.model), []
    with two_ways() as ways:
        for ways.fused in (False, True):
            steps.append(train_step(case, run))
    return *steps, fp8compile.compiles()


def matmuls(plans: list[fp8compile.Plan]) -> list[int]:
    """The FP8 matmuls of each graph with some."""
    return [len(plan.converted) for plan in plans if plan.converted]


def test_checkpointing_changes_no_bit() -> None:
    (a, _, plans), (b, _, again) = both_ways(), both_ways("checkpointed")
    assert matmuls(plans) == matmuls(again) == [12]  # two blocks: four linears
    assert same_bits(a, b)


def test_checkpointing_changes_the_rounding_of_fused_values_only() -> None:
    (_, a, _), (_, b, _) = both_ways(), both_ways("checkpointed")
    assert min(sqnr(a[name], b[name]) for name in a) > 25  # a value that is not stored is not rounded to BF16


def test_graph_break_changes_no_bit_and_loses_no_matmul() -> None:
    (a, _, plans), (b, _, of_each) = both_ways(), both_ways("broken")
    assert (matmuls(plans), matmuls(of_each)) == ([12], [6, 6])
    assert same_bits(a, b)


def test_autocast_runs_bf16_matmuls_and_gives_fp32_gradients() -> None:
    step, plans = trained("autocast", "mixed")
    assert {row.dtype for plan in plans for row in plan.converted} == {"bfloat16"}
    assert {gradient.dtype for name, gradient in step.items() if name != OUTPUT} == {torch.float32}


@pytest.mark.parametrize("name", ["llama", "vit"])
def test_inference_converts_the_forward_half(name: str) -> None:
    ref = reference(name)
    case = ref.case
    with torch.no_grad(), fake_quantized("mixed", case.left_weights()) as replaced:
        fake = _tensor(case.model(**case.inputs))
    with torch.no_grad():
        got = _tensor(compiled(case.model, "mixed", case.skip)(**case.inputs))
    assert not got.requires_grad
    assert {plan.graph for plan in fp8compile.compiles()} == {"inference"}
    assert converted() == len(replaced)
    allowed = SLACK * _ratio(sqnr(ref.bf16[OUTPUT], fake)) + 2 * ref.noise[OUTPUT]
    assert sqnr(ref.bf16[OUTPUT], got) >= max(LEAST["mixed"], -10 * math.log10(allowed))


@pytest.mark.parametrize("recipe", ["mixed", "rowwise"])
def test_no_stale_weight_after_a_step(recipe: str) -> None:
    case = blocks(depth=1)
    run = compiled(case.model, recipe)
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=0.05)
    before = train_step(case, run)
    optimizer.step()
    with torch.no_grad():
        case.model.get_parameter("blocks.0.up.weight").mul_(
            4
        )  # with its old scale, three quarters of it would saturate
    after = train_step(case, run)
    assert converted() == case.matmuls  # nothing was compiled again
    torch.compiler.reset()
    fresh = train_step(case, compiled(case.model, recipe))
    assert same_bits(after, fresh)
    assert sqnr(before[OUTPUT], after[OUTPUT]) < LEAST[recipe]  # the change is one that the comparison can see
    Reference.of(case).check(after, recipe)


def test_no_stale_weight_in_inference() -> None:
    case = blocks(depth=1)
    run = compiled(case.model)
    with torch.no_grad():
        before = run(**case.inputs)
        for parameter in case.model.parameters():
            parameter.mul_(2)
        after = run(**case.inputs)
        torch.compiler.reset()
        fresh = compiled(case.model)(**case.inputs)
    assert torch.equal(after, fresh)
    assert not torch.equal(before, after)


SIZES = [(BATCH, LENGTH), (3, 32), (7, 13)]


@pytest.mark.parametrize(
    ("name", "marked"),
    [("blocks", False), ("llama", True)],
    ids=lambda value: value if isinstance(value, str) else "marked_dynamic" if value else "found_dynamic",
)
def test_dynamic_batch_and_length_compile_twice_at_most(name: str, marked: bool) -> None:
    case = blocks(depth=1) if name == "blocks" else ZOO[name]()
    run = compiled(case.model)
    torch._dynamo.utils.counters.clear()
    for batch, length in SIZES[::2] if marked else SIZES:
        sized = _of_size(case, batch, length)
        ref = Reference.of(sized)
        if marked:
            for tensor in sized.inputs.values():
                torch._dynamo.mark_dynamic(tensor, (0, 1))
        ref.check(train_step(sized, run), "mixed")
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs <= (1 if marked else 2)
    assert [converted_in(plan) for plan in fp8compile.compiles()] == [case.matmuls] * graphs


def _of_size(case: Case, batch: int, length: int) -> Case:
    """The case with inputs and targets of another batch and length."""
    name = next(iter(case.inputs))
    if name == "input_ids":
        labels = tokens(batch, length, seed=3)
        return Case(case.model, {name: tokens(batch, length)}, next_token(labels), case.matmuls)
    shape = batch, length, WIDTH
    return Case(case.model, {name: noise(*shape)}, squared_error(noise(*shape, seed=3)), case.matmuls)
