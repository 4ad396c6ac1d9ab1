"""Saved activations that wait on the host: the same gradients, within the budget, and copies in their places."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from quick import quicken
from torch import Tensor, fx, nn

import fp8compile
from fp8compile import devices, host_copies
from fp8compile.errors import Fp8Warning, OptionError
from fp8compile.passes.lower.place_copies import place_copies

quicken()
FAST = replace(devices.describe(torch.device("cpu")), host_link=1e9)  # whatever forward saves can be copied in time
RETURNED = "returned by the model"
FP8: dict[str, Any] = {"select": "all", "strict": True}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(256), nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """A layer whose result is returned, and read by backward, so that no copy would free its memory; and blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.up, self.down = nn.Sequential(Block(), Block()), nn.Linear(256, 512), nn.Linear(512, 256)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        inner = self.up(x)
        return inner, self.blocks(self.down(nn.functional.gelu(inner)))


def trained(
    rows: int = 2048, dynamic: bool | None = None, **options: Any
) -> tuple[list[Tensor], fp8compile.Explanation]:
    """Return what a step leaves: results, gradients of the parameters and of the input; and the report."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Model()
    x = torch.randn(rows, 256, requires_grad=True)
    run = torch.compile(model, backend="fp8", dynamic=dynamic, options={**FP8, **options})
    with torch.autocast("cpu", torch.bfloat16):
        first, last = run(x)
    (first.float().mean() + last.float().square().mean()).backward()
    found = [first, last, x.grad, *(p.grad for p in model.parameters())]
    return [t.detach() for t in found if t is not None], fp8compile.last_compile()


class Overwriting(nn.Module):
    """Updates a running state in place, which backward needs as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        y = self.down(nn.functional.gelu(self.up(x) * state.clone()))
        state.mul_(0.5)
        return y


@pytest.mark.parametrize("executor", ["eager", "inductor"])
def test_an_input_that_forward_overwrites_is_not_moved(monkeypatch: pytest.MonkeyPatch, executor: str) -> None:
    monkeypatch.setattr(devices, "describe", lambda device: FAST)

    def gradients(**options: Any) -> list[Tensor]:
        torch.compiler.reset()
        torch.manual_seed(0)
        model, x, state = Overwriting(), torch.randn(2048, 256, requires_grad=True), torch.randn(2048, 1024)
        torch.compile(model, backend="fp8", options={**FP8, "executor": executor, **options})(x, state).sum().backward()
        return [*(p.grad for p in model.parameters() if p.grad is not None), x.grad, state]  # type: ignore[list-item]

    whole = gradients()
    kept = sum(row.bytes for row in rows_of(fp8compile.last_compile()))
    moved = gradients(activation_budget=9 * kept // 10, offload=True)
    assert any(row.on_host for row in rows_of(fp8compile.last_compile()))
    assert all(map(torch.equal, moved, whole))


def rows_of(report: Any) -> list[Any]:
    return [row for plan in report.plans for row in plan.saved]


@pytest.mark.parametrize("executor", ["eager", "inductor"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_the_same_gradients_within_the_budget(
    monkeypatch: pytest.MonkeyPatch, executor: str, dynamic: bool | None
) -> None:
    """Nothing runs again: all that is beyond the budget is moved, and comes back as it was."""
    monkeypatch.setattr(devices, "describe", lambda device: FAST)
    expected, before = trained(dynamic=dynamic, executor=executor)
    kept = sum(row.bytes for row in rows_of(before))
    got, report = trained(dynamic=dynamic, executor=executor, activation_budget=kept // 2, offload=True)
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.equal(mine, theirs)
    moved = [row for row in rows_of(report) if row.on_host]
    assert sum(row.gpu_bytes for row in rows_of(report)) <= kept // 2
    assert [row.bytes for row in rows_of(report)] == [row.bytes for row in rows_of(before)]
    assert len(moved) >= 2
    assert "on the host" in str(report)
    assert not host_copies._running


def test_what_the_model_returns_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory lives on: a copy would only add to it. So does what is small."""
    monkeypatch.setattr(devices, "describe", lambda device: FAST)
    _, before = trained(executor="eager")
    least = sum(row.bytes for row in rows_of(before) if row.reason == RETURNED or row.bytes < 2**20)
    rest = sum(row.bytes for row in rows_of(before)) - least  # of which scales, a 33rd, stay as well
    _, report = trained(executor="eager", activation_budget=least + rest // 31, offload=True)
    assert [row.node for row in rows_of(report)] == [row.node for row in rows_of(before)]
    assert any(row.reason == RETURNED for row in rows_of(report))
    assert not any(row.on_host for row in rows_of(report) if row.reason == RETURNED or row.bytes < 2**20)
    staying = [row for row in rows_of(report) if row.bytes >= 2**20 and row.reason != RETURNED and not row.on_host]
    assert len(staying) <= 1  # the last one, where the others are enough


def test_a_budget_that_cannot_be_met_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "describe", lambda device: FAST)
    with pytest.warns(Fp8Warning, match="neither moved nor computed again"):
        trained(executor="eager", activation_budget=1000, offload=True)


def test_what_is_moved_is_moved_too_where_more_has_to_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A little less than what stays beside all that is moved: that runs again, and copies go on."""
    monkeypatch.setattr(devices, "describe", lambda device: FAST)
    _, before = trained(executor="eager")
    kept = sum(row.bytes for row in rows_of(before))
    _, all_moved = trained(executor="eager", activation_budget=kept // 3, offload=True)
    staying = sum(row.gpu_bytes for row in rows_of(all_moved))
    on_host = sum(row.bytes - row.gpu_bytes for row in rows_of(all_moved))
    _, report = trained(executor="eager", activation_budget=staying - 2**18, offload=True)
    assert sum(row.gpu_bytes for row in rows_of(report)) <= staying - 2**18
    assert sum(row.bytes - row.gpu_bytes for row in rows_of(report)) > on_host / 2


class Region(nn.Module):
    """A block whose graph is one of its own within the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


@pytest.mark.filterwarnings("ignore:fp8. the activation budget:fp8compile.errors.Fp8Warning")
def test_nested_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A region moves what it saves; the graph around it moves what it has from regions, once.

    With torch 2.11 the graph around regions has no kernels, so no time for copies: it misses its budget, and warns.
    """
    monkeypatch.setattr(devices, "describe", lambda device: FAST)
    model, x, found = nn.Sequential(Region(), Region(), Region()), torch.randn(2048, 256), []
    for budget in ({}, {"activation_budget": 0.2, "offload": True}):
        torch.compiler.reset()
        model.zero_grad()
        run = torch.compile(model, backend="fp8", fullgraph=True, options={**FP8, "executor": "eager", **budget})
        run(x).square().mean().backward()
        found.append([p.grad for p in model.parameters()])
    moved = [row for row in rows_of(fp8compile.last_compile()) if row.on_host]
    assert moved or torch.__version__.startswith("2.11")
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))


@pytest.mark.parametrize("share", [0.15, 0.3])
def test_matmuls_run_again_for_what_copies_do_not_carry(share: float) -> None:
    """On a CPU's row of the table, at an H200's rates, a forward of microseconds leaves time for next to nothing."""
    alone, without = trained(executor="eager", activation_budget=share)
    both, report = trained(executor="eager", activation_budget=share, offload=True)
    _, usual = trained(executor="eager", activation_budget=1.0, save="bf16")
    limit = max(share * sum(row.bytes for row in rows_of(usual)), sum(row.bytes for row in rows_of(without)))
    assert sum(row.gpu_bytes for row in rows_of(report)) <= 1.01 * limit
    for mine, theirs in zip(both, alone, strict=True):
        assert float((mine - theirs).float().norm()) <= 0.1 * float(theirs.float().norm())


def test_slices_that_are_rounded_are_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Payloads of the halves of one result have memory of their own: nothing runs again."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both, self.down = nn.Linear(256, 1024), nn.Linear(512, 256)

        def forward(self, x: Tensor) -> Tensor:
            a, b = self.both(x).chunk(2, -1)
            return self.down(nn.functional.silu(a) * b)

    monkeypatch.setattr(devices, "describe", lambda device: FAST)
    model, x, found = Gated(), torch.randn(4096, 256), []
    for budget in ({}, {"activation_budget": 600_000, "offload": True}):
        torch.compiler.reset()
        run = torch.compile(model, backend="fp8", options={**FP8, "executor": "eager", **budget})
        run(x).square().mean().backward()
        found.append(rows_of(fp8compile.last_compile()))
    before, after = found
    assert [row.node for row in after] == [row.node for row in before]
    assert sum(row.on_host and row.shape == (4096, 512) for row in after) == 2
    assert sum(row.gpu_bytes for row in after) <= 600_000


@pytest.mark.parametrize(
    "options, said",
    [
        ({"offload": True}, "set one"),
        ({"offload": True, "activation_budget": 0.5, "mode": "reduce-overhead"}, "a CUDA graph keeps nothing"),
        ({"offload": "yes", "activation_budget": 0.5}, "'offload'"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        fp8compile.Options.parse(options)


# --- where copies stand


def called(graph: fx.Graph, target: Any, *args: Any, like: Tensor, name: str) -> fx.Node:
    node = graph.create_node("call_function", target, args, {}, name)
    node.meta["val"] = like
    return node


SIZE = 1024
X = torch.empty(SIZE, SIZE, device="meta")
SECONDS = 2 * SIZE**3 / 680e12  # of a matmul on an H200
LINK = replace(devices.TABLE["H200"], host_link=4 * SIZE**2 / (2.4 * SECONDS) / 1e12)  # a copy takes 2.4 of them


def forward_half() -> fx.Graph:
    """Eight matmuls in a row; the first two results are copied at the end."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = X
    made = [x]
    for i in range(8):
        made.append(called(graph, torch.ops.aten.mm.default, made[-1], x, like=X, name=f"mm{i}"))
    ends = []
    for i in (1, 0):
        host = called(graph, host_copies.to_host, made[i + 1], [0, 1], like=X, name=f"host{i}")
        ends.append(called(graph, host_copies.copied, host, made[i + 1], like=X, name=f"copied{i}"))
    graph.output((made[-1], *ends))
    return graph


def test_copies_to_the_host_follow_the_last_reader_and_are_waited_for_when_they_have_ended() -> None:
    graph = forward_half()
    place_copies(graph, LINK)
    graph.lint()
    names = [n.name for n in graph.nodes]
    order = "x mm0 mm1 host0 mm2 host1 mm3 mm4 copied0 mm5 mm6 copied1 mm7 output"
    assert " ".join(names) == order


def test_copies_to_the_device_begin_in_time() -> None:
    graph = fx.Graph()
    given = [graph.placeholder(f"saved{i}") for i in range(2)] + [graph.placeholder("x")]
    for node in given:
        node.meta["val"] = X
    backs = []
    for i in range(2):
        back = called(graph, host_copies.to_device, given[i], torch.device("cpu"), like=X, name=f"back{i}")
        backs.append(called(graph, host_copies.copied, back, given[i], like=X, name=f"copied{i}"))
    x = given[2]
    for i in range(8):
        x = called(
            graph, torch.ops.aten.mm.default, x, {6: backs[0], 7: backs[1]}.get(i, given[2]), like=X, name=f"mm{i}"
        )
    graph.output(x)
    place_copies(graph, LINK)
    graph.lint()
    names = [n.name for n in graph.nodes if n.op == "call_function"]
    assert names == ["mm0", "mm1", "back0", "mm2", "mm3", "back1", "mm4", "mm5", "copied0", "mm6", "copied1", "mm7"]


def test_a_view_s_memory_is_copied_when_its_last_reader_has_run() -> None:
    """What reads or writes the same memory by another name counts."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = X
    made = called(graph, torch.ops.aten.mm.default, x, x, like=X, name="made")
    view = called(graph, torch.ops.aten.permute.default, made, [1, 0], like=X, name="view")
    shown = called(graph, torch.ops.aten.permute.default, view, [1, 0], like=X, name="shown")
    other = called(graph, torch.ops.aten.mm.default, x, x, like=X, name="other")
    reads = called(graph, torch.ops.aten.mm.default, shown, other, like=X, name="reads")
    host = called(graph, host_copies.to_host, view, [0, 1], like=X, name="host")
    end = called(graph, host_copies.copied, host, view, like=X, name="end")
    graph.output((reads, end))
    place_copies(graph, LINK)
    graph.lint()
    names = [n.name for n in graph.nodes]
    assert names.index("reads") < names.index("host") < names.index("end")
