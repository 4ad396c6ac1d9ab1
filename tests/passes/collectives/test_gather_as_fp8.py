"""Casts in front of collectives, in the graph: what moves, every reason why something does not, verification.

A group of one process runs the same graphs as a larger one; tests/distributed/test_wire.py has two.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._inductor.fx_passes.micro_pipeline_tp import find_all_gather_patterns

import fp8compile
from fp8compile import devices, ops
from fp8compile.errors import VerificationError
from fp8compile.options import Options
from fp8compile.passes.collectives import gather_as_fp8
from fp8compile.passes.collectives.quantize_before_collective import Cast
from fp8compile.passes.core.collectives import ALL_GATHER, AS_BYTES, WAIT, Journey
from fp8compile.passes.core.compilation import Compilation, aten
from fp8compile.passes.core.verify import verify
from fp8compile.passes.lower.lower_markers import lower_markers
from fp8compile.plan.plan import Plan
from fp8compile.plan.rows import Transfer

pytestmark = pytest.mark.usefixtures("group_of_one")
EAGER = {"select": "all", "executor": "eager", "strict": True}
ROWS = 32
Use = Callable[[nn.Module, Tensor], object]


def gather(x: Tensor, dim: int = 0) -> Tensor:
    """What DTensor does to have all of a tensor that is sharded along `dim`."""
    group = dist.group.WORLD
    assert group is not None
    whole = torch.ops._c10d_functional.wait_tensor(
        torch.ops._c10d_functional.all_gather_into_tensor(x, 1, group.group_name)
    )
    return torch.cat(torch.chunk(whole, 2), dim) if dim else whole  # in two parts, as of two ranks


class Gathered(nn.Module):
    """A linear layer and something that happens to it and to what was gathered."""

    def __init__(self, use: Use, k: int = 64, dim: int = 0) -> None:
        super().__init__()
        self.linear, self.use, self.dim = nn.Linear(k, 48, bias=False), use, dim

    def forward(self, x: Tensor) -> object:
        return self.use(self.linear, gather(x, self.dim))


def alone(linear: nn.Module, y: Tensor) -> object:
    return linear(y)


def run(use: Use = alone, k: int = 64, dim: int = 0, **options: object) -> Transfer:
    """The row of the one all-gather."""
    torch.manual_seed(1)
    model = Gathered(use, k, dim).bfloat16()
    x = torch.randn(2, ROWS, k).bfloat16() if dim else torch.randn(ROWS, k).bfloat16()
    with torch.no_grad():
        torch.compile(model, backend="fp8", options={**EAGER, **options})(x)
    (row,) = fp8compile.last_compile().transfers
    return row


# --- what moves


@pytest.mark.parametrize("dim", [0, 1])
def test_a_payload_and_its_amaxes_travel_in_place_of_values(graphs, dim):
    row = run(dim=dim)
    assert (row.form, row.reason) == ("e4m3 row", "cast before it travels: the same values")
    rows = ROWS * (1 + dim)
    assert (row.before, row.after) == (rows * 64 * 2, rows * (64 + 4))
    (graph,) = graphs
    sent = [n.args[0].meta["val"].dtype for n in graph.find_nodes(op="call_function", target=ALL_GATHER)]
    assert sorted(map(str, sent)) == ["torch.float32", "torch.uint8"]


def test_the_plan_shows_what_travels():
    run()
    plan = fp8compile.last_compile().plans[-1]
    assert "wire      4.00 KiB → 2.12 KiB that ranks hand each other in 1 collective, sums left out" in str(plan)
    line = next(line for line in plan.table("transfers").splitlines() if "all-gather" in line)
    assert line.split("  ") == [
        "", "", "forward all-gather bfloat16[32, 64]", "e4m3 row", "4.00 KiB → 2.12 KiB",
        "cast before it travels: the same values",
    ]  # fmt: skip
    assert fp8compile.Plan.from_json(plan.to_json()) == plan
    assert plan.rows("transfers")[0]["after"] == ROWS * (64 + 4)


def test_inductor_still_knows_these_all_gathers(graphs):
    """Its pass for asynchronous tensor parallelism finds both, with the dimension that is gathered."""
    run(dim=1)
    found = {str(m.shard_node.meta["val"].dtype): m.gather_dim for m in find_all_gather_patterns(graphs[0])}
    assert found == {"torch.uint8": 1, "torch.float32": 1}


def test_a_gather_of_integers_is_nobodys_business():
    model = Gathered(lambda linear, i: linear(i.new_ones(ROWS, 64, dtype=torch.bfloat16) * i)).bfloat16()
    with torch.no_grad():
        torch.compile(model, backend="fp8", options=EAGER)(torch.ones(ROWS, 64, dtype=torch.int64))
    assert fp8compile.last_compile().transfers == []


def test_a_cast_reads_what_would_have_been_stored(moved):
    """Inductor leaves out a rounding to BF16 between kernels that it fuses: a view as integers keeps it."""
    lower_markers(moved)
    moved.lint()
    views = moved.find_nodes(op="call_function", target=AS_BYTES)
    source = next(iter(moved.nodes))
    assert [n.meta["val"].dtype for n in views if n.args[0] is source] == [torch.int16, torch.int16]  # amax, payload
    assert all(user.target is AS_BYTES for user in source.users)


# --- what does not


@pytest.mark.parametrize(
    ("use", "options", "reason"),
    [
        (alone, {"wire": "bf16"}, "wire='bf16'"),
        (lambda linear, y: (linear(y), y), {}, "read as it is by the caller"),
        (lambda linear, y: linear(y).sum() + y.sum(), {"wire": "fp8"}, "read as it is by sum"),
    ],
    ids=["option", "returned", "sum"],
)
def test_what_is_read_otherwise_travels_as_it_is(use, options, reason):
    row = run(use, **options)
    assert row.form == "bfloat16"
    assert row.before == row.after
    assert reason in row.reason


def test_little_is_not_worth_a_collective(monkeypatch):
    graph = fx.Graph()
    c = Compilation(graph, Options.parse({"select": "profitable"}), devices.TABLE["H200"], Plan())
    x = torch.empty(2**16, 64, dtype=torch.bfloat16)
    source = graph.placeholder("x")
    arrived = graph.call_function(WAIT, (graph.call_function(ALL_GATHER, (source, 1, "0")),))
    for node in graph.nodes:
        node.meta["val"] = x
    journey, casts = Journey(source, arrived.args[0], arrived), [Cast("e4m3", "row")]
    saved = 2**16 * (64 - 4)
    monkeypatch.setattr(gather_as_fp8, "LEAST", saved)
    assert gather_as_fp8.why_small(c, journey, casts) == ""
    monkeypatch.setattr(gather_as_fp8, "LEAST", saved + 1)
    assert gather_as_fp8.why_small(c, journey, casts) == (
        f"{saved} bytes less: one more collective costs more (select='all' moves it)"
    )


def test_a_padded_cast_stays_where_it_is():
    assert run(k=40).reason == "its cast is padded"


# --- verification


@pytest.fixture
def moved(graphs: list[fx.Graph]) -> fx.Graph:
    """The graph of a gathered operand, in front of whose gather the cast stands."""
    run()
    verify(graphs[0], "moved")
    return graphs[0]


def test_bytes_that_travel_are_no_numbers(moved):
    arrived = next(n for n in moved.find_nodes(op="call_function", target=WAIT) if n.meta["val"].dtype == torch.uint8)
    with moved.inserting_after(arrived):
        wrong = moved.call_function(aten.neg.default, (arrived,))
    wrong.meta["val"] = arrived.meta["val"]
    with pytest.raises(VerificationError, match="FP8 data is read without its scale by %neg"):
        verify(moved, "some_pass")


def test_bytes_that_travelled_meet_the_amaxes_that_travelled_with_them(moved):
    (matmul,) = moved.find_nodes(op="call_function", target=ops.scaled_mm)
    scale = matmul.args[1]
    (view,) = [n for n in moved.find_nodes(op="call_function", target=AS_BYTES) if n.meta["val"].dtype != torch.uint8]
    with moved.inserting_before(matmul):
        other = moved.call_function(ops.scale, (scale.args[0], "e5m2"))
    other.meta["val"] = scale.meta["val"]
    matmul.update_arg(1, other)
    with pytest.raises(VerificationError, match=f"%{view.name} was made with %.* and is read with %{other.name}"):
        verify(moved, "some_pass")
