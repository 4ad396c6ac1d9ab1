"""Losses in chunks: recognised in any form, never where something else reads the logits, and as exact as torch's own.

Values are compared with eager in FP64; every gradient may be as far from it as eager's in the model's own precision.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from joint import joint
from models import SIZES
from pipelines import look_after_stage
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8compile
from fp8compile.kernels.loss import chunked_loss as chunked
from fp8compile.kernels.loss.softmax_step import plain_step
from fp8compile.passes.core.compilation import Compilation
from fp8compile.passes.core.sizes import count
from fp8compile.passes.core.stages import Stage
from fp8compile.passes.loss import chunk_loss
from llama import Llama, LlamaConfig

ROWS, FEATURES, CLASSES, CHUNK = 96, 32, 80, 40  # two whole chunks and a part of one
Loss = Callable[..., Tensor]


class Half(torch.autograd.Function):
    """Something whose gradient is not the derivative of what it computes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 0.5


class Masked(Half):
    """The gradient of rows of one label is left out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return gradient.masked_fill((y == 50).unsqueeze(1), 0.0), None


class Constant(Half):
    """A gradient that nothing comes into."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.full_like(gradient, 0.01)


class Rectified(Half):
    """The same, in a way that no number makes up for."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.abs()


class Model(nn.Module):
    """x → norm → head → loss."""

    def __init__(self, loss: Loss, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(1 + 0.1 * torch.randn(FEATURES))
        self.head = nn.Linear(FEATURES, CLASSES, bias=bias)
        nn.init.normal_(self.head.weight, std=2 * FEATURES**-0.5)
        self.loss = loss

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return self.loss(self.head(x * self.scale), labels)


def inputs(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, FEATURES, generator=generator)
    return x, torch.randint(0, CLASSES, (rows,), generator=generator)


def compiled(model: Any, **options: Any) -> Any:
    defaults = {"executor": "eager", "strict": True, "chunk_loss": CHUNK}
    warnings.filterwarnings("ignore", "fp8: NOTHING was converted")
    return torch.compile(model, backend="fp8", options=defaults | options)


def step(model: nn.Module, run: Any, x: Tensor, labels: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
    """The loss and all gradients, divided by `scale` again."""
    model.zero_grad(set_to_none=True)
    x = x.detach().clone().requires_grad_()
    loss = run(x, labels)
    (loss * scale).backward()
    gradients = {"x": x.grad, **{name: p.grad for name, p in model.named_parameters()}}
    return {"loss": loss.detach()} | {n: g.detach().double() / scale for n, g in gradients.items() if g is not None}


def error(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def assert_as_exact(got: dict[str, Tensor], plain: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    """`got` has everything that `exact` has, no further from it than `plain`, which is rounded the same number of times
    (a quarter more is what the same number of roundings may draw at these sizes; a loss is one draw alone)."""
    assert got.keys() == exact.keys()
    for name, want in exact.items():
        assert got[name].shape == want.shape
        one_draw = 1e-6 if want.dim() else torch.finfo(got[name].dtype).eps
        assert error(got[name], want) <= 1.25 * error(plain[name], want) + one_draw, name


def check(loss: Loss, dtype: torch.dtype = torch.bfloat16, bias: bool = False, **options: Any) -> fp8compile.Plan:
    model = Model(loss, bias).to(dtype)
    x, labels = inputs()
    got = step(model, compiled(model, **options), x.to(dtype), labels)
    plan = fp8compile.last_compile().plans[-1]
    plain = step(model, model, x.to(dtype), labels)
    exact = copy.deepcopy(model).double()
    assert_as_exact(got, plain, step(exact, exact, x.to(dtype).double(), labels))
    assert plan is not None
    return plan


def check_graph(loss: Loss, dtype: torch.dtype = torch.bfloat16, bias: bool = False, **options: Any) -> fp8compile.Plan:
    """As `check`, of the passes on the graph of forward and backward alone."""
    model = Model(loss, bias).to(dtype)
    x, labels = inputs()
    x = x.to(dtype)
    traced = joint(model, x.clone().requires_grad_(), labels, **{"chunk_loss": CHUNK} | options)
    plan = traced.run()
    names = ["loss", *(name for name, _ in model.named_parameters()), "x"]
    got = dict(zip(names, traced.results(), strict=True))
    exact = copy.deepcopy(model).double()
    assert_as_exact(got, step(model, model, x, labels), step(exact, exact, x.double(), labels))
    return plan


def ignoring(labels: Tensor, value: int = -100) -> Tensor:
    return torch.where(torch.arange(len(labels)) % 3 == 0, value, labels)


def own(z: Tensor, y: Tensor) -> Tensor:
    return -z.log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1).mean()


def of_some_rows(z: Tensor, y: Tensor) -> Tensor:
    weights = (y % 3).to(z.dtype)
    return (F.cross_entropy(z, y, reduction="none") * weights).sum() / weights.sum()


def smoothed_by_hand(z: Tensor, y: Tensor) -> Tensor:
    """As in timm."""
    log_probabilities = z.log_softmax(-1)
    chosen = log_probabilities.gather(-1, y.unsqueeze(1)).squeeze(1)
    return (-0.9 * chosen - 0.1 * log_probabilities.mean(-1)).mean()


def smoothed_by_a_trainer(z: Tensor, y: Tensor) -> Tensor:
    """As in transformers."""
    losses, y = -z.log_softmax(-1), ignoring(y).unsqueeze(-1)
    ignored = y.eq(-100)
    chosen = losses.gather(-1, y.clamp(min=0)).masked_fill(ignored, 0.0)
    of_all = losses.sum(-1, keepdim=True, dtype=torch.promote_types(z.dtype, torch.float32)).masked_fill(ignored, 0.0)
    count = ignored.numel() - ignored.sum()
    return 0.9 * chosen.sum() / count + 0.1 * of_all.sum() / (count * z.shape[-1])


def distribution(z: Tensor, y: Tensor) -> Tensor:
    """Probabilities that a label leaves to other classes, as a matrix."""
    wanted = torch.full_like(z, 0.1 / (CLASSES - 1)).scatter(1, y.unsqueeze(1), 0.9)
    return -(wanted * z.log_softmax(-1)).sum(-1).mean()


def own_normaliser(z: Tensor, y: Tensor) -> Tensor:
    return (z.logsumexp(-1) - z.gather(-1, y.unsqueeze(-1)).squeeze(-1)).mean()


def penalised(z: Tensor, y: Tensor) -> Tensor:
    """With a z-loss."""
    z = torch.tanh(z / 3) * 3
    return F.cross_entropy(z, ignoring(y), label_smoothing=0.1) + 1e-2 * z.logsumexp(-1).square().mean()


FORMS: dict[str, Loss] = {
    "mean": F.cross_entropy,
    "widened": lambda z, y: F.cross_entropy(z.double() if z.dtype is torch.double else z.float(), y),
    "sum": lambda z, y: F.cross_entropy(z, y, reduction="sum"),
    "number of items": lambda z, y: F.cross_entropy(z, y, reduction="sum") / 30,
    "some ignored": lambda z, y: F.cross_entropy(z, ignoring(y)),
    "a label of its own is ignored": lambda z, y: F.cross_entropy(z, ignoring(y, 7), ignore_index=7),
    "batch and sequence": lambda z, y: F.cross_entropy(z.view(4, -1, CLASSES).flatten(0, 1), y.view(4, -1).flatten()),
    "shifted logits": lambda z, y: F.cross_entropy(
        z.view(4, -1, CLASSES)[:, :-1].reshape(-1, CLASSES), y.view(4, -1)[:, 1:].reshape(-1)
    ),
    "every third row": lambda z, y: F.cross_entropy(z[1::3], y[1::3], reduction="sum"),
    "scaled": lambda z, y: F.cross_entropy(z * 0.25, y),
    "divided, added to another": lambda z, y: F.cross_entropy(z / 3, y) * 2 + 1,
    "soft-capped": lambda z, y: F.cross_entropy(torch.tanh(z / 3) * 3, y),
    "log-softmax and gather": own,
    "weights of rows": of_some_rows,
    "half of its gradient": lambda z, y: F.cross_entropy(Half.apply(z), y),
    "a gradient that is a constant": lambda z, y: F.cross_entropy(Constant.apply(z), y),
    "label smoothing": lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1),
    "label smoothing, some ignored": lambda z, y: F.cross_entropy(z, ignoring(y), label_smoothing=0.1),
    "label smoothing, shifted": lambda z, y: F.cross_entropy(
        z.view(4, -1, CLASSES)[:, :-1].reshape(-1, CLASSES), y.view(4, -1)[:, 1:].reshape(-1), label_smoothing=0.1
    ),
    "label smoothing by hand": smoothed_by_hand,
    "label smoothing by a trainer": smoothed_by_a_trainer,
    "label smoothing by a distribution": distribution,
    "logarithm of the sum": own_normaliser,
    "labels as an index": lambda z, y: -z.log_softmax(-1)[torch.arange(len(y)), y].mean(),
    "labels from the end, as an index": lambda z, y: -z.log_softmax(-1)[torch.arange(len(y)), y - CLASSES].mean(),
    "a penalty on the normaliser": penalised,
    "rows dropped by a dimension from the end": lambda z, y: F.cross_entropy(
        z.view(4, -1, CLASSES).narrow(-2, 0, 23).reshape(-1, CLASSES), y.view(4, -1)[:, 1:].reshape(-1)
    ),
    "a linear penalty": lambda z, y: F.cross_entropy(z, y) + 0.1 * z.logsumexp(-1).mean(),
}


HALVES = (torch.bfloat16, torch.float16)  # forms take turns: a form's graph has the same operators in both
COMPILED = ("batch and sequence", "half of its gradient", "label smoothing by a trainer", "labels as an index")


@pytest.mark.parametrize(("form", "dtype"), [(form, HALVES[i % 2]) for i, form in enumerate(FORMS)])
def test_every_form_is_found_and_as_exact_as_eager(form: str, dtype: torch.dtype):
    (loss,) = check_graph(FORMS[form], dtype).losses
    assert (loss.chunk, loss.rows, loss.classes) == (CHUNK, ROWS, CLASSES)


@pytest.mark.parametrize("form", COMPILED)
def test_forms_as_a_compilation_hands_them_over(form: str):
    """Functions of their own, indices and mutated views, which Dynamo and AOT Autograd write in their own way."""
    (loss,) = check(FORMS[form]).losses
    assert (loss.chunk, loss.rows, loss.classes) == (CHUNK, ROWS, CLASSES)


@pytest.mark.parametrize("form", ["shifted logits", "a penalty on the normaliser"])
def test_a_bias_has_its_gradient(form: str):
    (loss,) = check_graph(FORMS[form], torch.float32, bias=True).losses
    assert loss.chunk == CHUNK


def test_inductor_gives_the_same():
    """Of a loss whose logits are computed again in backward."""
    model = Model(AGAIN["perplexity"], bias=True).bfloat16()
    x, labels = inputs()
    got = step(model, compiled(model, executor="inductor"), x.bfloat16(), labels)
    exact = copy.deepcopy(model).double()
    assert_as_exact(got, step(model, model, x.bfloat16(), labels), step(exact, exact, x.bfloat16().double(), labels))
    assert [loss.chunk for loss in fp8compile.last_compile().losses] == [CHUNK]


def logits_of(monkeypatch: pytest.MonkeyPatch, run: Callable[[], object]) -> list[str]:
    """Which values of joint graphs have rows and classes once all passes have run."""
    found: list[str] = []

    def look(c: Compilation) -> None:
        vals = [(n, n.meta.get("val")) for n in c.graph.nodes]
        found.extend(n.name for n, v in vals if isinstance(v, Tensor) and count(v.shape) >= ROWS * CLASSES)

    look_after_stage(monkeypatch, Stage.JOINT, look)
    run()
    return found


def test_logits_never_exist(monkeypatch: pytest.MonkeyPatch):
    loss = FORMS["a penalty on the normaliser"]
    assert logits_of(monkeypatch, lambda: check(loss)) == []
    torch.compiler.reset()
    assert logits_of(monkeypatch, lambda: check(loss, chunk_loss=False)) != []


def test_a_graph_without_backward_computes_losses_alone():
    model = Model(F.cross_entropy)
    x, labels = inputs()
    with torch.no_grad():
        got = compiled(model)(x, labels)
        torch.testing.assert_close(got, model(x, labels))
    plan = fp8compile.last_compile()
    assert plan is not None
    assert plan.graph == "inference"
    assert [loss.chunk for loss in plan.losses] == [CHUNK]


def test_two_losses_of_one_head_are_both_in_chunks():
    """As in models that predict several tokens ahead: both add to the gradient of one weight."""

    class Twice(Model):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            near = F.cross_entropy(self.head(x * self.scale), labels)
            return near + 0.3 * F.cross_entropy(self.head(torch.sin(x)), labels.flip(0))

    model = Twice(F.cross_entropy)
    x, labels = inputs()
    got, want = step(model, compiled(model), x, labels), step(model, model, x, labels)
    assert all(error(got[name], want[name]) < 1e-5 for name in want)
    plan = fp8compile.last_compile()
    assert plan is not None
    assert [loss.chunk for loss in plan.losses] == [CHUNK, CHUNK]


def test_frozen_heads_and_inputs_have_no_gradients():
    model = Model(F.cross_entropy).bfloat16()
    x, labels = inputs()
    model.head.requires_grad_(False)
    got = step(model, compiled(model), x.bfloat16(), labels)
    assert "head.weight" not in got
    exact = copy.deepcopy(model).double()
    assert_as_exact(got, step(model, model, x.bfloat16(), labels), step(exact, exact, x.bfloat16().double(), labels))


def test_rows_may_be_symbolic():
    model = Model(FORMS["some ignored"])
    run = torch.compile(model, backend="fp8", dynamic=True, options={"executor": "eager", "chunk_loss": CHUNK})
    for rows in (96, 31, 200):
        x, labels = inputs(rows)
        got, want = step(model, run, x, labels), step(model, model, x, labels)
        assert all(error(got[name], want[name]) < 1e-6 for name in want)
    plan = fp8compile.last_compile()
    assert plan is not None
    assert [loss.chunk for loss in plan.losses] == [CHUNK]


def test_a_symbolic_number_of_rows_may_divide():
    def mean(z: Tensor, y: Tensor) -> Tensor:
        return (-z.log_softmax(-1).gather(-1, y[:, None]).squeeze(1) / y.shape[0]).sum()

    model = Model(mean)
    run = torch.compile(model, backend="fp8", dynamic=True, options={"executor": "eager", "chunk_loss": CHUNK})
    for rows in (96, 31):
        x, labels = inputs(rows)
        got, want = step(model, run, x, labels), step(model, model, x, labels)
        assert all(error(got[name], want[name]) < 1e-6 for name in want)
    assert [loss.chunk for loss in fp8compile.last_compile().losses] == [CHUNK]


def test_there_may_be_no_rows():
    model = Model(FORMS["sum"]).half()
    x, labels = inputs(0)
    got = step(model, compiled(model), x.half(), labels)  # in chunks, unless a torch takes no softmax of nothing
    assert got["loss"] == 0
    assert not got["head.weight"].any()


def test_logits_may_be_multiplied_by_0():
    model = Model(lambda z, y: F.cross_entropy(z * 0, y))
    got = step(model, compiled(model), *inputs())
    assert "multiplied by 0" in fp8compile.last_compile().losses[0].reason
    torch.testing.assert_close(got["loss"], torch.tensor(float(CLASSES)).log())


def test_tiny_numbers_are_numbers():
    check_graph(lambda z, y: (F.cross_entropy(z, y, reduction="none") * 1e-12).sum() * 1e12, torch.float32)


def test_steep_curves_do_not_overflow_in_fp16():
    model = Model(lambda z, y: F.cross_entropy((z * 100).float(), y)).half()
    x, labels = inputs()
    got, want = step(model, compiled(model), x.half(), labels), step(model, model, x.half(), labels)
    assert fp8compile.last_compile().losses[0].chunk == CHUNK
    assert all(error(got[name], want[name]) < 0.01 for name in want)


def test_rows_that_are_dropped_may_overflow():
    """The last position of a sequence, which has no label."""
    model = Model(FORMS["shifted logits"]).half()
    x, labels = inputs()
    x[23] = 3e4
    got, want = step(model, compiled(model), x.half(), labels), step(model, model, x.half(), labels)
    assert fp8compile.last_compile().losses[0].chunk == CHUNK
    assert want["head.weight"].isfinite().all()
    assert all(error(got[name], want[name]) < 1e-2 for name in want)


def test_the_incoming_gradient_multiplies_before_anything_is_rounded():
    """Whatever a loss scale is, gradients in FP16 are those of eager; a mean over many rows leaves no subnormals."""
    x, labels = inputs(4096)
    model = Model(F.cross_entropy)

    def halved(x: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return model(x, labels)

    run = compiled(halved)
    for scale in (2.0**16, 3.0):
        got = step(model, run, x, labels, scale)
        plain = step(model, halved, x, labels, 2.0**16)
        assert_as_exact(got, plain, step(model, model, x, labels))


def test_backward_may_run_again_and_what_is_not_finite_stays_so():
    model = Model(F.cross_entropy)
    x, labels = inputs()
    run = compiled(model)
    x.requires_grad_()
    loss = run(x, labels)
    loss.backward(retain_graph=True)
    assert model.head.weight.grad is not None
    once = model.head.weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(model.head.weight.grad, 2 * once)
    x, labels = inputs()
    x[3, 5] = torch.inf
    got, want = step(model, run, x, labels), step(model, model, x, labels)
    assert all(torch.equal(got[name].isfinite(), want[name].isfinite()) for name in want)
    x, labels = inputs()
    overflown = step(model, run, x, labels, torch.inf)
    assert not any(overflown[name].isfinite().any() for name in ("x", "head.weight"))


def test_all_labels_ignored_is_nan_and_has_no_gradients():
    model = Model(lambda z, y: F.cross_entropy(z, torch.full_like(y, -100)))
    x, labels = inputs()
    got = step(model, compiled(model), x, labels)
    assert got["loss"].isnan()
    assert not any(got[name].any() for name in got if name != "loss")


LOSSES_OF_LABELS: dict[str, Loss] = {
    "cross_entropy": F.cross_entropy,
    "another number ignored": lambda z, y: F.cross_entropy(z, y, ignore_index=3),
    "smoothed sum": lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1, reduction="sum"),
    "gathered": lambda z, y: -z.log_softmax(-1).gather(1, y[:, None]).mean(),
    "some rows dropped": lambda z, y: F.cross_entropy(
        z.view(8, -1, CLASSES)[:, :-1].flatten(0, 1), y.view(8, -1)[:, 1:].flatten()
    ),
    "losses of rows": lambda z, y: (F.cross_entropy(z, y, reduction="none").exp() - 1).mean(),
}


@pytest.mark.parametrize("label", [CLASSES, 10 * CLASSES, -1, -100, -(2**31), -(2**40)])
@pytest.mark.parametrize("name", LOSSES_OF_LABELS)
def test_a_label_that_is_no_class_raises(name: str, label: int):
    """As torch's own losses do, before anything could be trained on."""
    if label == -100 and name not in ("another number ignored", "gathered"):
        return  # what they ignore
    model = Model(LOSSES_OF_LABELS[name])
    x, labels = inputs()
    run = compiled(model, chunk_loss=True if name == "losses of rows" else CHUNK)
    run(x, labels).backward()
    assert fp8compile.last_compile().plans[0].losses[0].chunk
    labels[5] = label
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        model(x, labels)
    with pytest.raises(RuntimeError, match="a label is out of bounds: it is none of 0 … 79"):
        run(x, labels)


# ---- models ---------------------------------------------------------------------------------------------------------


class WithLoss(nn.Module):
    """A model of transformers that returns its loss alone."""

    def __init__(self, model: nn.Module, **given: Any) -> None:
        super().__init__()
        self.model, self.given = model, given

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.model(input_ids=ids, labels=labels, **self.given).loss


TIED = {**SIZES, "num_hidden_layers": 1, "tie_word_embeddings": True}


def test_a_model_of_transformers():
    """Tied weights, soft-capped logits, a number of items."""
    torch.manual_seed(0)
    config = transformers.Gemma2Config(**TIED, head_dim=16, use_cache=False)
    model = WithLoss(transformers.Gemma2ForCausalLM(config), num_items_in_batch=torch.tensor(50)).float()
    assert model.model.lm_head.weight is model.model.model.embed_tokens.weight
    ids = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(2))
    grads = []
    for run in (compiled(model, chunk_loss=13), model):
        model.zero_grad(set_to_none=True)
        run(ids, ids).backward()
        grads.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    plan = fp8compile.last_compile()
    assert plan is not None
    assert [loss.chunk for loss in plan.losses] == [13]
    assert grads[0].keys() == grads[1].keys()
    assert all(error(grads[0][n], grads[1][n]) < 1e-4 for n in grads[1])


class Checkpointed(nn.Module):
    """A model in a checkpointed region, loss and all."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return checkpoint(self.model, x, labels, use_reentrant=False)


def test_a_checkpoint_around_the_loss_computes_it_once(monkeypatch: pytest.MonkeyPatch):
    runs: list[object] = []
    run = chunked.run
    monkeypatch.setattr(chunked, "plain_step", lambda *given: runs.append(given) or plain_step(*given))
    monkeypatch.setattr(run, "__defaults__", (False, chunked.plain_step))
    model = Model(F.cross_entropy)
    x, labels = inputs()
    got = step(model, compiled(Checkpointed(model)), x, labels)
    want = step(model, model, x, labels)
    assert all(error(got[name], want[name]) < 1e-5 for name in want)
    assert len(runs) == len(chunked.chunks(ROWS, CHUNK))


def test_the_example_trains_alike():
    """FP32 parameters under autocast, in FP8 but for the head: with chunks, as without."""
    torch.manual_seed(0)
    model = Llama(LlamaConfig(dim=64, n_layers=1, n_heads=4, n_kv_heads=2, hidden=128), max_seq=32)
    text = torch.randint(0, 256, (4, 33), generator=torch.Generator().manual_seed(2))

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(tokens, targets)

    found = []
    for chunks in (False, 50):
        model.zero_grad(set_to_none=True)
        torch.compiler.reset()
        out = compiled(loss, chunk_loss=chunks, select="all")(text[:, :-1], text[:, 1:].contiguous())
        out.backward()
        found.append((out.detach(), {n: p.grad for n, p in model.named_parameters()}))
    plan = fp8compile.last_compile()
    assert plan is not None
    assert [row.chunk for row in plan.losses] == [50]
    assert plan.converted
    (whole, expected), (loss_of_chunks, gradients) = found
    torch.testing.assert_close(loss_of_chunks, whole, rtol=1e-6, atol=0)  # the same BF16 logits
    for name, want in expected.items():  # what goes back is rounded to BF16 at other places, and then to FP8
        assert want is not None
        assert error(gradients[name], want) < (0.005 if name == "lm_head.weight" else 0.1), name


# ---- what only backward knows ---------------------------------------------------------------------------------------


def log_probabilities(z: Tensor, y: Tensor) -> Tensor:
    return z.log_softmax(-1).gather(-1, y.unsqueeze(1)).squeeze(1)


def focal(z: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(z, y, reduction="none")
    return ((1 - torch.exp(-losses)) ** 2 * losses).mean()


def preference(z: Tensor, y: Tensor) -> Tensor:
    """As in direct preference optimisation: two sequences are to be likelier than two others."""
    of_sequences = log_probabilities(z, y).view(4, -1).sum(-1)
    return -F.logsigmoid(0.1 * (of_sequences[:2] - of_sequences[2:])).mean()


def policy(z: Tensor, y: Tensor) -> Tensor:
    """As in proximal policy optimisation: ratios of probabilities, clipped, times an advantage."""
    ratio = torch.exp(log_probabilities(z, y) - log_probabilities(z.detach(), y) + 0.3 * torch.sin(y))
    advantage = (y % 3 - 1).to(z.dtype)
    return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()


AGAIN: dict[str, Loss] = {
    "focal loss": focal,
    "focal loss, shifted": lambda z, y: focal(
        z.view(4, -1, CLASSES)[:, :-1].reshape(-1, CLASSES), y.view(4, -1)[:, 1:].reshape(-1)
    ),
    "a preference": preference,
    "a policy": policy,
    "perplexity": lambda z, y: F.cross_entropy(z, y).exp(),
    "weights by the normaliser": lambda z, y: (F.cross_entropy(z, y, reduction="none") * z.logsumexp(-1).sign()).mean(),
    "a penalty of a higher order": lambda z, y: F.cross_entropy(z, y) + 1e-2 * z.logsumexp(-1).pow(3).mean(),
    "losses in another order": lambda z, y: (
        F.cross_entropy(z, y, reduction="none").view(4, -1).gather(1, y.view(4, -1) % 24).mean()
    ),
    "what is a number": lambda z, y: (lambda losses: torch.where(losses == losses, losses, 0.0).mean())(
        F.cross_entropy(z, y, reduction="none")
    ),
}


@pytest.mark.parametrize(("form", "dtype"), [(form, HALVES[i % 2]) for i, form in enumerate(AGAIN)])
def test_what_only_backward_knows_is_as_exact_as_eager(form: str, dtype: torch.dtype):
    (loss,) = check_graph(AGAIN[form], dtype, bias=True).losses
    assert loss.chunk == CHUNK
    assert loss.reason.startswith("logits are computed again in backward: how much ")


def test_a_size_is_not_the_number():
    """Normalisers below zero, which random logits hardly ever have."""
    model = Model(lambda z, y: F.cross_entropy(z, y) + z.logsumexp(-1).abs().mean(), bias=True)
    assert model.head.bias is not None
    model.head.bias.data.fill_(-30)
    got, want = step(model, compiled(model), *inputs()), step(model, model, *inputs())
    assert all(error(got[name], want[name]) < 1e-5 for name in want)
    assert fp8compile.last_compile().losses[0].chunk == CHUNK


def test_losses_of_rows_may_be_returned():
    model = Model(lambda z, y: F.cross_entropy(z, y, reduction="none"))
    x, labels = inputs()
    gradients = []
    for run in (compiled(model), model):
        model.zero_grad(set_to_none=True)
        run(x, labels).backward(torch.sin(torch.arange(ROWS)))
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert fp8compile.last_compile().losses[0].chunk == CHUNK
    assert all(error(gradients[0][name], want) < 1e-5 for name, want in gradients[1].items())


def test_computed_again_are_logits_and_nothing_else(monkeypatch: pytest.MonkeyPatch):
    runs: list[bool] = []
    monkeypatch.setattr(chunked, "plain_step", lambda *given: runs.append(given[4]) or plain_step(*given))
    monkeypatch.setattr(chunked.run, "__defaults__", (False, chunked.plain_step))
    assert logits_of(monkeypatch, lambda: check(preference)) == []
    assert runs == [False] * 3 + [True] * 3


def test_logits_are_computed_again_only_if_chunks_are_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chunk_loss, "LEAST_BYTES", 1)
    monkeypatch.setattr(chunk_loss, "rows_of_chunk", lambda k: ROWS // 2)
    (row,) = check_graph(focal, chunk_loss="auto").losses
    assert row.chunk == 0
    assert row.reason.endswith("chunk_loss=True computes logits in chunks, and again in backward")


# ---- what is left ---------------------------------------------------------------------------------------------------


def several(z: Tensor, y: Tensor) -> Tensor:
    wanted = torch.zeros_like(z).scatter(1, torch.stack([y, (y + 1) % CLASSES], 1), 0.5)
    return -(wanted * z.log_softmax(-1)).sum(-1).mean()


TEMPERATURE = torch.tensor(0.5)
CLASS_WEIGHTS = torch.linspace(0.5, 1.5, CLASSES)
LEFT: dict[str, tuple[Loss, str]] = {
    "class weights": (lambda z, y: F.cross_entropy(z, y, CLASS_WEIGHTS), "its logits are read by aten.mul"),
    "logits are returned": (lambda z, y: (F.cross_entropy(z, y), z), "its logits are returned"),
    "accuracy": (
        lambda z, y: (F.cross_entropy(z, y), (z.argmax(-1) == y).sum()), "its logits are read by aten.argmax",
    ),
    "a penalty on the largest": (lambda z, y: F.cross_entropy(z, y) + z.amax(-1).mean(), "is read by aten."),
    "two softmaxes": (lambda z, y: F.cross_entropy(z, y) + F.cross_entropy(z / 2, y), "2 different softmaxes"),
    "two labels a row": (lambda z, y: F.cross_entropy(z, y) + F.cross_entropy(z, y.flip(0)), "is read by aten."),
    "a number of classes written by hand": (
        lambda z, y: F.cross_entropy(z, y) + 0.01 * (z.sum(-1) - CLASSES * z.logsumexp(-1)).mean(), "is read by aten.",
    ),
    "a temperature": (lambda z, y: F.cross_entropy(z * TEMPERATURE, y), "its logits are read by aten.mul"),
    "a gradient of its own": (
        lambda z, y: F.cross_entropy(Rectified.apply(z), y), "gradient of its logits is not that of a cross-entropy",
    ),
    "a gradient with a mask": (
        lambda z, y: F.cross_entropy(Masked.apply(z, y), y), "gradient of its logits is not that of a cross-entropy",
    ),
    "a label is another": (
        lambda z, y: F.cross_entropy(z, y) + F.cross_entropy(z, torch.where(y == 50, 7, y)), "is read by aten.",
    ),
    "several labels a row": (several, "its logits are read by aten."),
    "every other row, two labels each": (
        lambda z, y: -z.log_softmax(-1).gather(-1, y.view(-1, 2)).mean(), "its logits are read by aten.gather",
    ),
    "nearly nothing of them": (
        lambda z, y: F.cross_entropy(z * 0 + z[:1] * 1e-3, y), "its logits are read by aten.slice",
    ),
    "another label is ignored": (
        lambda z, y: F.cross_entropy(z, y, ignore_index=50) + F.cross_entropy(z, y), "is read by aten.",
    ),
    "a logarithm of a little more": (
        lambda z, y: -(z.softmax(-1).gather(-1, y[:, None]) + 1e-12).log().mean(), "a value of rows is read by aten.",
    ),
    "labels by the normaliser": (
        lambda z, y: -z.log_softmax(-1).gather(-1, torch.where(z.logsumexp(-1) > 3, 0, y)[:, None]).mean(),
        "its labels depend on its logits",
    ),
    "labels by comparison": (
        lambda z, y: -(F.one_hot(y, CLASSES) * z.log_softmax(-1)).sum(-1).mean(), "its logits are read by aten.mul",
    ),
    "rows dropped twice": (lambda z, y: F.cross_entropy(z[1:][:-1], y[1:-1]), "its logits are read by aten.slice"),
    "rows dropped, and read elsewhere": (
        lambda z, y: (F.cross_entropy(z[1:], y[1:]), z[0].sum()), "its logits are read by aten.s",
    ),
    "classes in the middle": (
        lambda z, y: F.cross_entropy(z.unflatten(0, (4, -1)).transpose(1, 2), y.view(4, -1)),
        "its logits are read by aten.",
    ),
    "a mask on logits": (lambda z, y: F.cross_entropy(z.clamp(-2, 2), y), "its logits are read by aten.clamp_min"),
}  # fmt: skip


# what is returned beside a loss, tensors of nobody, and operators that a compilation takes apart
LEFT_COMPILED = {
    "class weights", "logits are returned", "accuracy", "a temperature", "every other row, two labels each",
    "nearly nothing of them", "rows dropped, and read elsewhere", "a gradient with a mask",
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in LEFT if name not in LEFT_COMPILED])
def test_what_is_left_says_why(name: str):
    loss, why = LEFT[name]
    (row,) = check_graph(loss, torch.float32, chunk_loss=True).losses
    assert row.chunk == 0
    assert why in row.reason


@pytest.mark.parametrize("name", sorted(LEFT_COMPILED))
def test_what_is_left_says_why_and_is_right(name: str):
    loss, why = LEFT[name]
    model = Model(loss)
    x, labels = inputs()
    run = compiled(model, chunk_loss=True)
    results = []
    for call in (run, model):
        model.zero_grad(set_to_none=True)
        out = call(x, labels)
        (out[0] if isinstance(out, tuple) else out).sum().backward()
        assert model.head.weight.grad is not None
        results.append(model.head.weight.grad.clone())
    assert error(*results) < 1e-5
    plan = fp8compile.last_compile()
    assert plan is not None
    (row,) = plan.losses
    assert row.chunk == 0
    assert why in row.reason


def test_fp64_is_left():
    model = Model(F.cross_entropy).double()
    x, labels = inputs()
    got, want = step(model, compiled(model), x.double(), labels), step(model, model, x.double(), labels)
    assert all(error(got[name], want[name]) < 1e-12 for name in want)
    plan = fp8compile.last_compile()
    assert plan is not None
    assert "torch.float64" in plan.losses[0].reason


CUTS: dict[str, Loss] = {  # of logits [batch, length, classes]
    "the last": lambda z, y: F.cross_entropy(z[:, :-1].flatten(0, 1), y[:, 1:].flatten()),
    "the last, as transformers wrote it": lambda z, y: F.cross_entropy(
        z[..., :-1, :].contiguous().view(-1, CLASSES).float(), y[..., 1:].contiguous().view(-1), ignore_index=-100
    ),
    "the first three": lambda z, y: F.cross_entropy(z[:, 3:].flatten(0, 1), y[:, 3:].flatten(), label_smoothing=0.1),
    "one of the batch": lambda z, y: F.cross_entropy(z[1:].flatten(0, 1), y[1:].flatten(), reduction="sum"),
    "known in backward alone": lambda z, y: F.cross_entropy(z[:, :-1].flatten(0, 1), y[:, 1:].flatten()).exp(),
}


def check_sizes_that_change(loss: Loss) -> list[tuple[int, str]]:
    """Compare steps of several batches and lengths in one compilation; returns chunks and reasons of its losses."""
    model = Model(loss, bias=True)
    torch.compiler.reset()
    options = {"executor": "eager", "strict": True, "chunk_loss": CHUNK}
    run = torch.compile(model, backend="fp8", dynamic=True, options=options)
    for batch, length in ((4, 24), (3, 31), (7, 9)):
        x, labels = (t.view(batch, length, *t.shape[1:]) for t in inputs(batch * length))
        got, want = step(model, run, x, labels), step(model, model, x, labels)
        assert got.keys() == want.keys()
        assert all(error(got[name], want[name]) < 1e-6 for name in want)
    (plan,) = fp8compile.last_compile().plans
    assert all("s" in str(loss.rows) for loss in plan.losses)
    return [(loss.chunk, loss.reason) for loss in plan.losses]


@pytest.mark.parametrize("cut", CUTS)
def test_logits_that_are_cut_at_sizes_that_change(cut: str, monkeypatch: pytest.MonkeyPatch) -> None:
    losses: list[tuple[int, str]] = []
    assert logits_of(monkeypatch, lambda: losses.extend(check_sizes_that_change(CUTS[cut]))) == []
    ((chunk, _),) = losses
    assert chunk == CHUNK


@pytest.mark.parametrize("cut", [lambda z: z[:, : z.shape[1] // 2], lambda z: z[:, 1::2], lambda z: z[:, :5]])
def test_logits_of_which_more_is_cut_where_there_is_more_are_whole(cut: Callable[[Tensor], Tensor]) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(cut(z).flatten(0, 1), cut(y[..., None])[..., 0].flatten())

    ((chunk, reason),) = check_sizes_that_change(loss)
    assert chunk == 0
    assert "its logits are cut at sizes that change" in reason


def test_small_logits_are_whole_by_default(monkeypatch: pytest.MonkeyPatch):
    assert check_graph(F.cross_entropy, chunk_loss="auto").losses == []
    monkeypatch.setattr(chunk_loss, "LEAST_BYTES", 1)
    (row,) = check_graph(F.cross_entropy, chunk_loss="auto").losses
    assert "fewer than 2 chunks of 2048 rows" in row.reason
    monkeypatch.setattr(chunk_loss, "rows_of_chunk", lambda k: ROWS // 2)
    (row,) = check_graph(F.cross_entropy, chunk_loss="auto").losses
    assert row.chunk == ROWS // 2


def test_the_plan_says_what_was_done():
    plan = check(F.cross_entropy)
    assert {m.reason for m in plan.matmuls} == {"the output head and its loss run in chunks of 40 rows"}
    assert "loss      in chunks of 40 rows: 15.00 KiB of logits never exist" in str(plan)
    assert fp8compile.Plan.from_json(plan.to_json()) == plan
    (row,) = plan.rows("losses")
    assert row["rows"] == ROWS


def test_gradients_wait_for_backward_and_nothing_else(monkeypatch: pytest.MonkeyPatch):
    assert logits_of(monkeypatch, lambda: check(FORMS["widened"])) == []
    rows = {(s.shape, s.dtype) for s in fp8compile.last_compile().plans[-1].saved}
    assert ((CLASSES, FEATURES), "float32") in rows
    assert ((ROWS, FEATURES), "float32") in rows
    assert not any(CLASSES in shape and ROWS in shape for shape, _ in rows)


def test_a_graph_without_a_loss_is_not_touched():
    linear = nn.Linear(16, 16)
    compiled(linear, select="all")(torch.randn(4, 16)).sum().backward()
    plan = fp8compile.last_compile()
    assert plan is not None
    assert plan.losses == []
