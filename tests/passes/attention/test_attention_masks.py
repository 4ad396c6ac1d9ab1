"""Attention masks that are constants: told to attention where they are causal or let everything through."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from joint import joint
from torch import Tensor, nn

import fp8compile
from fp8compile.errors import OptionError
from fp8compile.passes.attention import attention_masks
from fp8compile.plan.plan import Plan

pytestmark = pytest.mark.filterwarnings("ignore:fp8. NOTHING was converted")  # masks are all that these tests are for
HEADS, WIDTH, LENGTH = 2, 32, 24
Make = Callable[[int, Tensor], Tensor]


def packed(n: int, x: Tensor) -> Tensor:
    """As transformers finds packed sequences: where positions do not go up by one, another begins."""
    positions = torch.arange(n, device=x.device).expand(len(x), -1)
    steps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
    sequence = (steps != 1).cumsum(-1)
    same = sequence[:, None, :, None] == sequence[:, None, None, :]
    return same & (positions[:, None, None, :] <= positions[:, None, :, None])


def alibi(n: int, x: Tensor) -> Tensor:
    distance = torch.arange(n, device=x.device)[None, :] - torch.arange(n, device=x.device)[:, None]
    return (distance * 0.1).masked_fill(distance > 0, -torch.inf).to(x.dtype)


def heads_apart(n: int, x: Tensor) -> Tensor:
    """Causal in the first head alone."""
    causal = torch.ones(n, n, dtype=torch.bool, device=x.device).tril()
    return torch.stack([causal, torch.ones_like(causal).tril(2)])[None]


def written(n: int, x: Tensor) -> Tensor:
    """Of zeros, in place: the -inf is a tensor of the graph."""
    mask = torch.zeros(n, n, dtype=x.dtype, device=x.device)
    mask[torch.arange(n)[None, :] > torch.arange(n)[:, None]] = -torch.inf
    return mask


def in_chunks(size: int) -> Make:
    def make(n: int, x: Tensor) -> Tensor:
        i = torch.arange(n, device=x.device)
        return (i[:, None] >= i[None, :]) & (i[:, None] // size == i[None, :] // size)

    return make


CAUSAL: dict[str, Make] = {
    "positions": lambda n, x: torch.arange(n, device=x.device)[:, None] >= torch.arange(n, device=x.device)[None, :],
    "tril": lambda n, x: torch.ones(n, n, dtype=torch.bool, device=x.device).tril(),
    "bias": lambda n, x: torch.full((n, n), -torch.inf, dtype=x.dtype, device=x.device).triu(1),
    "least number": lambda n, x: torch.full((n, n), torch.finfo(x.dtype).min, dtype=x.dtype, device=x.device).triu(1)[
        None, None
    ],
    "cuDNN's": lambda n, x: torch.full((n, n), -65504.0, dtype=x.dtype, device=x.device).triu(1).bfloat16().to(x.dtype),
    "large": lambda n, x: torch.full((n, n), -1e9, dtype=x.dtype, device=x.device).triu(1),
    "wide window": lambda n, x: torch.ones(n, n, dtype=torch.bool, device=x.device).tril().triu(-n),
    "packed": packed,
    "written": written,
    "list": lambda n, x: torch.tensor([[j <= i for j in range(n)] for i in range(n)], device=x.device),
    "sorted": lambda n, x: (
        torch.arange(n, device=x.device).flip(0).sort().values[:, None]
        >= torch.ones(n, device=x.device).cumsum(0).long()[None, :] - 1
    ),
    "one chunk": lambda n, x: in_chunks(n)(n, x),
    "each head": lambda n, x: torch.ones(HEADS, n, n, dtype=torch.bool, device=x.device).tril()[None],
}
EVERYTHING: dict[str, Make] = {
    "ones": lambda n, x: torch.ones(n, n, dtype=torch.bool, device=x.device),
    "zero bias": lambda n, x: torch.zeros(1, 1, n, n, dtype=x.dtype, device=x.device),
}
KEPT: dict[str, Make] = {
    "window": lambda n, x: torch.ones(n, n, dtype=torch.bool, device=x.device).tril().triu(-4),
    "later": lambda n, x: torch.ones(n, n, dtype=torch.bool, device=x.device).tril(1),
    "positions added": alibi,
    "chunks": in_chunks(8),
    "prefix": lambda n, x: torch.ones(n, n, dtype=torch.bool, device=x.device).tril() | (torch.arange(n) < 4),
    "half": lambda n, x: torch.full((n, n), -0.5, dtype=x.dtype, device=x.device).triu(1),
    "not never": lambda n, x: torch.full((n, n), -1e4, dtype=x.dtype, device=x.device).triu(1),
    "heads apart": heads_apart,
    "of the batch": lambda n, x: (x[:, None, :, :1] < 99) & torch.ones(n, n, dtype=torch.bool, device=x.device).tril(),
    "random": lambda n, x: (
        (torch.rand(n, n, device=x.device) < 2) & torch.ones(n, n, dtype=torch.bool, device=x.device).tril()
    ),
}


class Attention(nn.Module):
    def __init__(self, make: Make, keys: int | None = None, width: int = WIDTH):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.make, self.keys = make, keys

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = (y.view(b, n, HEADS, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        k, v = k[:, :, : self.keys], v[:, :, : self.keys]
        mask = self.make(n, x)[..., : self.keys]
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).reshape(b, n, -1))


def step(model: Callable[[Tensor], Tensor], parameters: list[nn.Parameter]) -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.randn(3, LENGTH, WIDTH, requires_grad=True)
    y = model(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *parameters])]


def compiled(model: nn.Module, dynamic: bool = False, **options: object) -> Plan:
    """The plan, once the results are found to be those of eager."""
    torch.compiler.reset()
    parameters = list(model.parameters())
    run = torch.compile(
        model, backend="fp8", dynamic=dynamic, options={"executor": "eager", "skip": ["*"], "strict": True, **options}
    )
    for got, expected in zip(step(run, parameters), step(model, parameters), strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)
    return fp8compile.last_compile().plans[-1]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def folded(make: Make) -> Plan:
    """The plan of the passes on the graph of forward and backward, whose results are those of eager."""
    model = Attention(make)
    x = torch.randn(3, LENGTH, WIDTH, requires_grad=True)
    traced = joint(model, x, skip=["*"])
    plan = traced.run()
    gradient = torch.randn(3, LENGTH, WIDTH)
    y = model(x)
    expected = [y.detach(), *torch.autograd.grad(y, [*model.parameters(), x], gradient)]
    for got, wanted in zip(traced.results(gradient), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5)
    return plan


# what Dynamo and AOT Autograd write in their own way (lists, writes in place, random numbers), and some of each kind
COMPILED = ("bias", "packed", "written", "list", "each head", "zero bias", "window", "random", "of the batch")
MASKS = CAUSAL | EVERYTHING | KEPT
TRACED = [name for name in MASKS if name != "written"]


def assert_told(name: str, plan: Plan) -> None:
    kind = "causal" if name in CAUSAL else "everything" if name in EVERYTHING else None
    assert [(m.kind, m.shape[-2:]) for m in plan.masks] == ([(kind, (LENGTH, LENGTH))] if kind else [])
    assert ("causal by a constant mask" in str(plan)) == (kind == "causal")


@pytest.mark.parametrize("name", TRACED)
def test_causal_masks_and_those_that_hide_nothing_are_told_and_others_are_read(name):
    assert_told(name, folded(MASKS[name]))


@pytest.mark.parametrize("name", COMPILED)
def test_masks_of_a_compilation(name):
    assert_told(name, compiled(Attention(MASKS[name])))


def test_causal_is_of_as_many_queries_as_keys():
    """With fewer keys, torch and masks disagree on what causal means."""
    plan = compiled(Attention(CAUSAL["tril"], keys=LENGTH // 2))
    assert not plan.masks


def test_a_buffer_may_change():
    class Buffered(Attention):
        def __init__(self):
            super().__init__(lambda n, x: self.mask)
            self.register_buffer("mask", torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())

    plan = compiled(Buffered())
    assert not plan.masks


def test_a_list_may_change():
    """What the program has written out is a constant as long as it is the same program."""
    seen = [[j <= i for j in range(LENGTH)] for i in range(LENGTH)]
    model = Attention(lambda n, x: torch.tensor(seen))
    run = torch.compile(model, backend="fp8", options={"executor": "eager", "skip": ["*"], "strict": True})
    for kinds in (["causal"], []):
        for got, expected in zip(step(run, []), step(model, []), strict=True):
            torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)
        assert [m.kind for m in fp8compile.last_compile().masks] == kinds
        seen[3][5] = True


def test_operators_of_others_may_know_more():
    """Nothing of a schema says that an operator gives the same each time."""
    allowed = {"later": False}

    @torch.library.custom_op("attention_masks::made_elsewhere", mutates_args=())
    def made(n: int) -> Tensor:
        return torch.ones(n, n, dtype=torch.bool).tril(1 if allowed["later"] else 0)

    made.register_fake(lambda n: torch.empty(n, n, dtype=torch.bool))
    model = Attention(lambda n, x: made(n))
    run = torch.compile(model, backend="fp8", options={"executor": "eager", "skip": ["*"], "strict": True})
    for allowed["later"] in (False, True):
        torch.testing.assert_close(step(run, []), step(model, []), rtol=2e-5, atol=2e-5)
    assert not fp8compile.last_compile().masks


def test_what_is_expanded_counts_once(monkeypatch: pytest.MonkeyPatch):
    """As for attention on a GPU, which takes a bias of all batches and heads. On the way lie positions, INT64."""
    monkeypatch.setattr(attention_masks, "LARGEST", 8 * LENGTH * LENGTH)
    plan = compiled(Attention(lambda n, x: CAUSAL["bias"](n, x).expand(len(x), HEADS, n, n)))
    assert [m.kind for m in plan.masks] == ["causal"]
    plan = compiled(Attention(lambda n, x: CAUSAL["bias"](n, x).repeat(len(x), HEADS, 1, 1)))
    assert not plan.masks


def test_batches_of_any_size():
    model = Attention(lambda n, x: CAUSAL["bias"](n, x).expand(len(x), HEADS, n, n))
    run = torch.compile(model, backend="fp8", options={"executor": "eager", "skip": ["*"], "strict": True})
    for batch in (2, 5):
        x = torch.randn(batch, LENGTH, WIDTH)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(run(x), model(x), rtol=2e-5, atol=2e-5)
    (mask,) = fp8compile.last_compile().masks
    assert (mask.kind, mask.shape) == ("causal", (LENGTH, LENGTH))


@pytest.mark.parametrize("x", [torch.nan, torch.inf, -1.0])
def test_one_number_makes_it_another_mask(x: float):
    mask = torch.full((3, 3), -torch.inf).triu(1)
    assert attention_masks._allowed(mask).tolist() == torch.ones(3, 3).tril().bool().tolist()
    mask[1, 0] = x
    assert attention_masks._allowed(mask) is None


def test_what_cannot_be_computed_is_read(monkeypatch: pytest.MonkeyPatch):
    """For want of memory, or because an operator has no deterministic kernel where these are asked for."""

    def fail(node: object) -> Tensor:
        raise RuntimeError("no deterministic implementation")

    monkeypatch.setattr(attention_masks, "_computed", fail)
    assert not compiled(Attention(CAUSAL["tril"])).masks


def test_the_option():
    plan = compiled(Attention(CAUSAL["packed"]), fold_masks=False)
    assert not plan.masks
    with pytest.raises(OptionError, match="fold_masks"):
        fp8compile.Options.parse({"fold_masks": "no"})


def test_no_bytes_are_kept_for_a_mask():
    masked = compiled(Attention(CAUSAL["bias"]), fold_masks=False, save="bf16")
    told = compiled(Attention(CAUSAL["bias"]), save="bf16")
    assert told.saved_bytes < masked.saved_bytes


def test_plan_as_json():
    plan = compiled(Attention(CAUSAL["tril"]))
    assert Plan.from_json(plan.to_json()).masks == plan.masks
    assert plan.rows("masks")[0]["kind"] == "causal"
