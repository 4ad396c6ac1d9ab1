"""Weights that are only cast are freed: bits stay, and what needs them as they were raises."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from models import ZOO, tokens
from torch import Tensor, nn

import fp8compile
from fp8compile import weight_uses
from fp8compile.errors import FreedWeightError
from fp8compile.torch_hooks import kept_casts

EAGER = {"select": "all", "executor": "eager", "strict": True}
INDUCTOR = {"select": "all", "strict": True}


class Layers(nn.Module):
    """Two layers of one input, which become one, behind a third; an embedding, which is read as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 48)
        self.up, self.a, self.b = nn.Linear(48, 64), nn.Linear(64, 32), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.gelu(self.up(self.table(x)))
        return self.a(hidden) * self.b(hidden)


class Either(Layers):
    """Reads a weight as it is where there are few numbers."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) if len(x) > 8 else self.up(self.table(x))[:, :32] * self.a.weight.float().mean()


CAST = ("up.weight", "a.weight", "b.weight")


@pytest.fixture(autouse=True)
def models_go() -> Iterator[None]:
    """Values of freed weights stay as long as these."""
    yield
    torch.compiler.reset()
    gc.collect(1)  # all of this test: what is older is looked through for a second


def frozen(model: Any = None, **options: Any) -> Any:
    model = (Layers() if model is None else model).bfloat16()
    return fp8compile.freeze(model, options={**EAGER, **options}, dynamic=False)


def numbers(count: int = 16) -> Tensor:
    return torch.arange(count) % 16


@pytest.mark.parametrize("options", [EAGER, INDUCTOR])
@torch.no_grad()
def test_bits_stay(options: dict[str, Any]) -> None:
    model = frozen(**options)
    right = {count: model(numbers(count)) for count in (16, 32)}
    bytes_of = sum(dict(model.named_parameters())[name].nbytes for name in CAST)
    assert fp8compile.free_weights(model) == bytes_of
    for name, parameter in model.named_parameters():
        assert parameter.isnan().all() == (name in CAST)
        assert parameter.untyped_storage().nbytes() == (2 if name in CAST else parameter.nbytes)
    for _ in range(2):
        for count, before in right.items():
            assert torch.equal(model(numbers(count)), before)


@torch.no_grad()
def test_nothing_is_cast_again_and_each_call_is_traced_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    model = frozen()
    model(numbers())
    ran: list[int] = []
    run = kept_casts.KeptCasts._renewed
    monkeypatch.setattr(kept_casts.KeptCasts, "_renewed", lambda self, weights: ran.append(1) or run(self, weights))
    fp8compile.free_weights(model)
    plans = len(fp8compile.compiles())
    for _ in range(3):
        model(numbers())
    assert len(ran) == 1
    assert len(fp8compile.compiles()) == plans + 1


@torch.no_grad()
def test_llama_prompt_and_token_with_tied_weights() -> None:
    model = frozen(ZOO["llama_tied"]().model if "llama_tied" in ZOO else ZOO["llama"]().model)
    prompt = tokens()

    def logits() -> list[Tensor]:
        return [model(input_ids=prompt[:, :length]).logits for length in (16, 1)]

    before = logits()
    assert fp8compile.free_weights(model) > 0
    assert not model.get_input_embeddings().weight.isnan().any()
    assert all(map(torch.equal, logits(), before))


@torch.no_grad()
def test_a_new_kind_of_call_that_needs_casts_raises() -> None:
    """Here, of a weight as it is."""

    model = frozen(Either())
    model(numbers())
    fp8compile.free_weights(model)
    with pytest.raises(FreedWeightError, match=r"^a\.weight: .*once before fp8compile.free_weights"):
        model(numbers(4))
    assert model(numbers()).isfinite().all()


def two_layers() -> Any:
    return frozen(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32)))


def ones(rows: int) -> Tensor:
    return torch.ones(rows, 64, dtype=torch.bfloat16)


@torch.no_grad()
@pytest.mark.parametrize("first", [0, 16])
def test_an_empty_batch_reads_no_weight(first: int) -> None:
    """Whether it comes before weights are freed or after."""
    model = two_layers()
    model(ones(first))
    expected = model(ones(16))
    assert fp8compile.free_weights(model) == 2 * (64 * 64 + 64 * 32)
    assert model(ones(0)).shape == (0, 32)
    assert torch.equal(model(ones(16)), expected)


def test_errors_call_a_freed_weight_by_its_name() -> None:
    model = two_layers()
    with torch.no_grad():
        model(ones(16))
        fp8compile.free_weights(model)
    model.requires_grad_(True)
    with pytest.raises(FreedWeightError, match=r"^0\.weight was freed"):
        model(ones(16))


@torch.no_grad()
def test_what_another_call_reads_as_it_is_stays() -> None:
    model = frozen(Either())
    right = [model(numbers(count)) for count in (16, 4)]
    fp8compile.free_weights(model)
    assert not model.a.weight.isnan().any()
    assert model.b.weight.isnan().all()
    assert all(torch.equal(model(numbers(count)), x) for count, x in zip((16, 4), right, strict=True))
    with torch.no_grad():
        model.a.weight.mul_(2)  # cast together with b's, which is gone
    with pytest.raises(FreedWeightError, match=r"^b\.weight: .* change no weight that is cast with a freed one"):
        model(numbers())


class OneRead(Layers):
    """Casts three weights by themselves; reads the last one as it is where there are few numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.c(super().forward(x)) * (self.c.weight.float().mean() if len(x) <= 8 else 1)


@pytest.mark.parametrize("options", [EAGER, INDUCTOR])
@pytest.mark.parametrize("how", ["written", "another", "of inference mode"])
@torch.no_grad()
def test_a_weight_that_was_not_freed_may_change(how: str, options: dict[str, Any]) -> None:
    """Of a graph whose other weights were freed, and stay what they were."""
    made = OneRead()
    other = frozen(copy.deepcopy(made), **options)  # whose weights stay
    model = frozen(made, **options)
    for count in (16, 4):
        assert torch.equal(model(numbers(count)), other(numbers(count)))
    fp8compile.free_weights(model)
    assert not model.c.weight.isnan().any()
    assert model.up.weight.isnan().all()
    before = model(numbers())
    for each in (model, other):
        torch.manual_seed(3)
        with torch.inference_mode(how == "of inference mode"):
            new = torch.randn(32, 32).bfloat16()
            if how == "written":
                each.c.weight.copy_(new)
            else:
                each.c.weight = nn.Parameter(new, requires_grad=False)
    for _ in range(2):
        for count in (16, 4):
            assert torch.equal(model(numbers(count)), other(numbers(count)))
    assert not torch.equal(model(numbers()), before)
    assert model.up.weight.isnan().all()


@torch.no_grad()
def test_a_graph_without_casts_reads_too() -> None:
    class Reading(Layers):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x) if len(x) > 8 else self.up.weight[:, 0] * 2

    model = frozen(Reading())
    model(numbers())
    model(numbers(4))
    fp8compile.free_weights(model)
    assert not model.up.weight.isnan().any()
    assert model(numbers(4)).isfinite().all()


@torch.no_grad()
def test_before_anything_has_run() -> None:
    model = frozen()
    with pytest.raises(FreedWeightError, match="run it once"):
        fp8compile.free_weights(model)
    with pytest.raises(FreedWeightError, match="run it once"):
        fp8compile.free_weights(Layers())


@torch.no_grad()
def test_a_weight_that_was_written_since() -> None:
    model = frozen()
    model(numbers())
    model.b.weight.mul_(2)
    with pytest.raises(FreedWeightError, match="written since"):
        fp8compile.free_weights(model)
    assert not any(parameter.isnan().any() for parameter in model.parameters())  # nor were those before it freed
    right = model(numbers())
    fp8compile.free_weights(model)
    assert torch.equal(model(numbers()), right)


@torch.no_grad()
def test_saving_loading_writing_exporting(tmp_path: Any) -> None:
    model = frozen()
    right = model(numbers())
    saved = copy.deepcopy(model.state_dict())
    fp8compile.free_weights(model)
    with pytest.raises(FreedWeightError, match=r"Layers: up.weight was freed.*saved or loaded"):
        model.state_dict()
    with pytest.raises(FreedWeightError, match=r"Layers: up.weight was freed.*saved or loaded"):
        model.load_state_dict({name: x + 1 for name, x in saved.items()})
    assert torch.equal(model.table.weight, saved["table.weight"])  # nothing was loaded before it raised
    with pytest.raises(RuntimeError, match="single memory location"):
        model.up.weight.mul_(2)
    with pytest.raises(FreedWeightError, match=r"up.weight was freed.*exported"):
        fp8compile.export(model, tmp_path / "folder", layers=["up"])
    assert torch.equal(model(numbers()), right)
    again = Layers().bfloat16()
    again.load_state_dict(saved)
    assert torch.equal(frozen(again)(numbers()), right)


@torch.no_grad()
def test_a_weight_that_is_given_memory_again() -> None:
    model = frozen()
    right, saved = model(numbers()), {name: x.clone() for name, x in model.named_parameters()}
    fp8compile.free_weights(model)
    for name, parameter in model.named_parameters():
        parameter.data = saved[name].clone()
    assert torch.equal(model(numbers()), right)
    model.load_state_dict(model.state_dict())
    model.up.weight.mul_(2)
    assert not torch.equal(model(numbers()), right)


@torch.no_grad()
def test_a_reset_keeps_what_cannot_be_computed_again() -> None:
    model, other = frozen(), frozen()
    right = model(numbers())
    other(numbers())
    fp8compile.free_weights(model)
    torch.compiler.reset()
    assert all(value.is_of_freed for value in kept_casts._values.by_key.values())
    assert torch.equal(model(numbers()), right)


def test_nothing_is_known_of_a_weight_that_is_gone() -> None:
    weight_uses._uses.clear()
    with torch.no_grad():
        model = frozen()
        model(numbers())
        fp8compile.free_weights(model)
    assert len(weight_uses._uses) >= 3
    del model
    torch._dynamo.reset()
    gc.collect()
    assert not weight_uses._uses
    assert not kept_casts._values.by_key


FILLS = {
    "zero_": lambda w: w.zero_(),
    "fill": lambda w: nn.init.constant_(w, 0.5),
    "masked": lambda w: w.masked_fill_(w.isnan(), 1.0),
}


@pytest.mark.parametrize("name", list(FILLS))
@torch.no_grad()
def test_writes_that_torch_allows_are_not_ignored(name: str) -> None:
    """Of one element for all."""
    model = frozen()
    model(numbers())
    fp8compile.free_weights(model)
    FILLS[name](model.up.weight)
    with pytest.raises(FreedWeightError, match=r"^up\.weight: this call casts what was freed"):
        model(numbers())


class Own(nn.Module):
    """Has its weight itself, with a graph break behind it or not, and reads it where it is told to."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.weight, self.breaks = nn.Parameter(torch.randn(48, 48) / 7), breaks

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        y = x @ self.weight
        if self.breaks:
            torch._dynamo.graph_break()
        return y.relu() * scale


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 1


class OwnLinear(nn.Linear):
    """A class of a user's, whose forward is torch's."""


def with_a_forward_of_its_own() -> Own:
    """As libraries make it that move weights before a call."""
    model = Own()
    old = model.forward
    model.forward = lambda *args, **kwargs: old(*args, **kwargs)  # type: ignore[method-assign]
    return model


class OwnLike(Own):
    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return super().forward(x, scale=scale) + 1


OWNERS = {
    "the root": Own,
    "a root with a graph break": lambda: Own(breaks=True),
    "a block with a graph break": lambda: Around(Own(breaks=True)),
    "a block": lambda: Around(Own()),
    "torch's class": lambda: nn.Linear(48, 48),
    "a class whose forward is torch's": lambda: OwnLinear(48, 48),
    "a traced module": lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(48, 48))),
    "a forward of its own": with_a_forward_of_its_own,
    "a block with a forward of its own": lambda: Around(with_a_forward_of_its_own()),
}


@pytest.mark.filterwarnings("error:.*nothing of")
@pytest.mark.parametrize("name", list(OWNERS))
@torch.no_grad()
def test_whoever_has_the_weight(name: str) -> None:
    """Compiled calls stay as they were; where nothing is compiled, they raise."""
    model = frozen(OWNERS[name]())
    x = torch.randn(16, 48).bfloat16()
    before = model(x)
    assert fp8compile.free_weights(model) == 48 * 48 * 2
    for _ in range(2):
        assert torch.equal(model(x), before)
    with torch.compiler.set_stance("force_eager"), pytest.raises(FreedWeightError, match="this call is not compiled"):
        model(x)
    owner = next(m for m in model.modules() if m._parameters)
    with pytest.raises(FreedWeightError, match="outside of the model that was frozen"):
        owner.forward(x)
    assert torch.equal(model(x), before)


@torch.no_grad()
def test_calls_that_torch_does_not_compile_any_more_raise() -> None:
    """Beyond torch's limit they would run in Python, on NaN."""
    model, counts = frozen(Own()), (4, 8, 12, 16, 20, 24)
    rows = {count: torch.randn(count, 48).bfloat16() for count in counts}
    right = {count: model(rows[count]) for count in counts}
    fp8compile.free_weights(model)
    with torch._dynamo.config.patch(recompile_limit=4):
        for count in counts[:4]:
            assert torch.equal(model(rows[count]), right[count])
        for count in counts[4:]:
            with pytest.raises(FreedWeightError, match="recompile_limit"):
                model(rows[count])
    with torch.compiler.set_stance("force_eager"), pytest.raises(FreedWeightError, match="this call is not compiled"):
        model(rows[4])


class Twins(nn.Module):
    """Two layers of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Own(), Own()
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


@torch.no_grad()
def test_all_that_share_a_weight_refuse() -> None:
    model = frozen(Twins())
    x = torch.randn(16, 48).bfloat16()
    right = model(x)
    fp8compile.free_weights(model)
    assert torch.equal(model(x), right)
    for part in (model.a, model.b):
        with pytest.raises(FreedWeightError, match="outside of the model"):
            part(x)


@torch.no_grad()
def test_experts_in_one_weight() -> None:
    """torch looks at how a grouped matmul's operands lie when it traces one; what is shown is one expert's."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(4, 64, 32) / 6)
            self.down = nn.Parameter(torch.randn(4, 32, 64).mT / 8)

        def forward(self, x: Tensor, ends: Tensor) -> Tensor:
            hidden = nn.functional.grouped_mm(x, self.up, offs=ends)
            return nn.functional.grouped_mm(hidden.relu(), self.down.mT, offs=ends)

    model = frozen(Experts())
    x, ends = torch.randn(64, 64).bfloat16(), torch.tensor([16, 16, 48, 64], dtype=torch.int32)
    right = model(x, ends)
    strides = [p.stride() for p in model.parameters()]
    assert fp8compile.free_weights(model) == (2 * 4 - 1) * 64 * 32 * 2  # of two weights of four matrices one remains
    for p, old in zip(model.parameters(), strides, strict=True):
        assert (p.stride(), bool(p.isnan().all())) == ((0, *old[1:]), True)
        assert p.untyped_storage().nbytes() == 64 * 32 * 2
    for _ in range(2):
        assert torch.equal(model(x, ends), right)


class Strange(Own):
    """May not be subclassed, and looks at its own class."""

    def __init_subclass__(cls) -> None:
        raise TypeError("this class has no subclasses")

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return super(type(self), self).forward(x, scale=scale) if type(self) is Strange else x


@torch.no_grad()
def test_a_class_that_may_not_be_subclassed() -> None:
    model = frozen(Around(Strange()))
    x = torch.randn(16, 48).bfloat16()
    right = model(x)
    fp8compile.free_weights(model)
    assert torch.equal(model(x), right)


@torch.no_grad()
def test_nothing_is_freed_where_a_forward_cannot_be_replaced() -> None:
    class Property(Own):
        @property
        def forward(self) -> Any:  # type: ignore[override]
            return super().forward

    model = nn.Sequential(Around(Own()), Around(Property())).bfloat16().requires_grad_(False)
    for part in model:
        torch.compile(part, backend="fp8", options={**EAGER, "frozen": True}, dynamic=False)(
            torch.ones(16, 48).bfloat16()
        )
    with pytest.raises(FreedWeightError, match=r"Property: .*forward is a property"):
        fp8compile.free_weights(model)
    assert not any(p.isnan().any() for p in model.parameters())
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("strict", [True, False])
@torch.no_grad()
def test_a_freed_model_is_not_exported_by_torch(strict: bool) -> None:
    model = frozen(Around(Own()))
    x = torch.randn(16, 48).bfloat16()
    model(x)
    fp8compile.free_weights(model)
    with pytest.raises(Exception, match="weights were freed"):
        torch.export.export(model, (x,), strict=strict)


@torch.no_grad()
def test_freed_models_do_not_share_what_torch_counts() -> None:
    """Each may be called in as many ways as one alone, of one class and of several."""
    models = [frozen(kind()) for kind in (Own, Own, OwnLike)]
    x = torch.randn(16, 48).bfloat16()
    before = [[model(x[:count]) for count in (4, 8, 16)] for model in models]
    for model in models:
        fp8compile.free_weights(model)
    with torch._dynamo.config.patch(recompile_limit=3):
        for model, right in zip(models, before, strict=True):
            for count, expected in zip((4, 8, 16), right, strict=True):
                assert torch.equal(model(x[:count]), expected)


CONVERSIONS = {
    "dtype": lambda m: m.to(torch.float16),
    "half": lambda m: m.half(),
    "float": lambda m: m.float(),
    "device": lambda m: m.to("meta"),
    "empty": lambda m: m.to_empty(device="cpu"),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": pickle.dumps,
    "average": torch.optim.swa_utils.AveragedModel,
}


@pytest.mark.parametrize("name", list(CONVERSIONS))
@torch.no_grad()
def test_conversions_and_copies_raise_and_change_nothing(name: str) -> None:
    model = frozen()
    right = model(numbers())
    fp8compile.free_weights(model)
    for each in (model, model.up):
        with pytest.raises(FreedWeightError, match=r"weight was freed.*cannot be (converted|copied)"):
            CONVERSIONS[name](each)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    model.to(torch.bfloat16).to("cpu").train().eval()  # as it is
    assert torch.equal(model(numbers()), right)


@torch.no_grad()
def test_a_guarded_module_is_what_it_was() -> None:
    model = frozen(Around(Own()))
    model(torch.randn(16, 48).bfloat16())
    fp8compile.free_weights(model)
    assert type(model.inner) is Own
    assert list(inspect.signature(model.inner.forward).parameters) == ["x", "scale"]
    for parameter in model.parameters():
        parameter.data = torch.ones(48, 48).bfloat16()
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))  # with memory again
    assert not any({"forward", "_apply", "__reduce_ex__"} & set(vars(module)) for module in copied.modules())
    assert copied.half()(torch.ones(1, 48).half())[0, 0] == 49


def test_freed_in_inference_mode() -> None:
    model = frozen()
    with torch.inference_mode():
        right = model(numbers())
        fp8compile.free_weights(model)
        assert torch.equal(model(numbers()), right)
    with torch.no_grad():
        assert torch.equal(model(numbers()), right)


def test_who_needs_the_weight_otherwise_raises() -> None:
    """For gradients; and a second model, which is not frozen."""
    model, other = frozen(), Layers().bfloat16()
    other.up.weight = model.up.weight
    with torch.no_grad():
        model(numbers())
        fp8compile.free_weights(model)
        with pytest.raises(FreedWeightError, match=r"^up\.weight was freed"):
            torch.compile(other, backend="fp8", options=EAGER)(numbers())
    model.up.weight.requires_grad_(True)
    with pytest.raises(FreedWeightError, match="for gradients"):
        model(numbers())


@torch.no_grad()
def test_reads_of_several_weights_by_one_graph_are_all_noted() -> None:
    weights = [nn.Parameter(torch.randn(64, 64).bfloat16(), requires_grad=False) for _ in range(3)]
    options = {**EAGER, "frozen": True}
    table = nn.Parameter(torch.randn(4).bfloat16(), requires_grad=False)
    cast = torch.compile(lambda x, w: nn.functional.linear(x, w).relu(), backend="fp8", options=options)
    read = torch.compile(lambda x, t, w: x * t.sum() * w.float().mean(), backend="fp8", options=options)
    both = torch.compile(
        lambda x, c, w: nn.functional.linear(x, c).relu() * w.float().mean(), backend="fp8", options=options
    )
    x = torch.randn(16, 64).bfloat16()
    for weight in weights:
        cast(x, weight)
    for weight in weights[:2]:
        read(x, table, weight)
    both(x, weights[2], weights[0])
    both(x, weights[2], weights[1])
    assert [weight_uses.is_cast_alone(weight) for weight in weights] == [False, False, True]
