"""benchmarks/micro/kernels.py without a GPU: what the passes make of every row, and that it computes the right
thing."""

from __future__ import annotations

import json
from dataclasses import replace

import interpreter
import pytest
import torch

from benchmarks.micro import kernels as benchmark
from fp8compile.kernels.check import check_kernel
from fp8compile.kernels.codegen import generated
from fp8compile.kernels.codegen.schedule.one_pass import is_one_pass
from fp8compile.kernels.codegen.schedule.tiling import Schedule
from fp8compile.kernels.codegen.spec.region import Region


def experts(name: str, rows: int, wide: int) -> tuple[Region, Schedule]:
    """Return the kernel that `name`, which is one of experts', becomes for so many tokens and inner features."""
    (row,) = benchmark.selected(name)
    (node,) = benchmark.form(row, replace(benchmark.FULL, rows=rows, wide=wide), "cpu").regions
    return generated.parse(node.args[2], node.args[3])  # type: ignore[arg-type]


@pytest.mark.parametrize("row", benchmark.ROWS, ids=lambda row: row.name)
def test_row_forms_what_it_states_and_computes_its_function(row):
    result = benchmark.fake(row)
    assert result.notes == []  # launches as stated, every cast in a region, results of the plain function
    assert (result.launches, result.left) == (row.launches, 0)
    assert result.mib > 0


@pytest.mark.parametrize("row", benchmark.ROWS, ids=lambda row: row.name)
def test_no_cast_is_left(row):
    for shapes in (benchmark.TINY, benchmark.FULL):
        formed = benchmark.form(row, shapes, "cpu")
        assert formed.casts == []
        assert formed.reasons == []


def test_bytes_count_every_input_and_output_once():
    (row,) = benchmark.selected("swiglu_backward_cast")
    s = benchmark.FULL
    elements = s.rows * s.wide
    scalars = 4 * (2 + 2)  # two amaxes, two scales
    assert benchmark.fake(row).mib * benchmark.MIB == elements * (3 * 2 + 5) + scalars


def test_a_row_that_states_something_else_is_noted():
    (row,) = benchmark.selected("cast_row")
    assert benchmark.fake(replace(row, launches=2)).notes == ["expected 2 launches, and nothing left"]


def test_a_cast_that_no_region_takes_is_noted():
    (row,) = benchmark.selected("cast_group128")
    shapes = replace(benchmark.FULL, cols=4000)  # no multiple of 128
    formed = benchmark.form(row, shapes, "cpu")
    assert not formed.regions
    assert [n.target for n in formed.casts] == [torch.ops.fp8.amax.default, torch.ops.fp8.scale.default,
                                                torch.ops.fp8.quantize.default]  # fmt: skip
    expected, left = benchmark.describe(row, formed).notes[:2]
    assert expected == "expected 1 launches, and nothing left"
    assert left == "left as it is: %amax"


def test_wrong_results_are_noted():
    (row,) = benchmark.selected("cast_row")

    def call(fp8, x):
        return row.call(fp8, x if fp8 is benchmark.markers else x.flip(0))

    lines = benchmark.check(replace(row, call=call), benchmark.TINY, "cpu")
    assert [line.split(":")[0] for line in lines] == ["result 0", "result 1"]


def test_table_and_json(capsys, tmp_path):
    file = tmp_path / "figures.json"
    (result,) = benchmark.main(["--fake", "--only", "amax", "--regions", "--json", str(file)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["amax", "2", "128.0", *["–"] * 6]
    assert len(lines) == 3 + result.launches
    assert json.loads(file.read_text())["rows"][0]["kernels"][0]["text"] == result.kernels[0].text


def test_table_with_times():
    result = benchmark.Result("cast_row", 1, 2, 192.0625, 50.25, 0.934, 120.5, 2, 2.398, 119.0, ["wrong: y0"])
    cells = "cast_row 1 + 2 192.1 50.2 93% 120.5 2 2.40 119.0 wrong: y0"
    assert benchmark.table_line(result).split() == cells.split()


def test_a_name_that_no_row_has():
    with pytest.raises(SystemExit, match="no row is called 'cast_col'; there are: cast_row, "):
        benchmark.main(["--fake", "--only", "cast_row,cast_col"])


@pytest.mark.parametrize(
    ("name", "wide", "held", "tile", "warps"),
    [
        ("experts_backward", 768, True, 256, 1),
        ("experts_backward", 1408, True, 512, 2),
        ("experts_backward", 2048, False, 2048, 2),
        ("experts_backward", 5632, True, 2048, 4),
        ("experts_backward", 7168, True, 1024, 8),
        ("experts_backward", 8192, False, 8192, 16),
        ("experts_backward", 14336, True, 2048, 4),
        ("experts_forward", 1408, True, 512, 1),
        ("experts_forward", 2816, True, 1024, 2),
        ("experts_forward", 7168, True, 2048, 4),
        ("experts_forward", 8960, True, 2048, 4),
        ("experts_forward", 14336, True, 2048, 4),
    ],
)
def test_rows_of_experts_have_the_tiles_that_were_fastest(name, wide, held, tile, warps):
    """On an H200, of 20 to 40 that were tried for each width."""
    _, schedule = experts(name, 32768, wide)
    (tiling,) = schedule.tilings
    assert (tiling.held, tiling.block_cols, schedule.warps) == (held, tile, warps)
    assert tiling.row_programs == 32768 // tiling.block_rows  # none walks


@pytest.mark.parametrize("wide", [1536, 5632, 11008, 14336, 28672])
@pytest.mark.parametrize("name", ["swiglu_saved_backward", "gelu_backward"])
def test_wide_casts_take_one_pass(name, wide):
    """No kernel between them puts pieces of amaxes together, of which programs that walk leave few."""
    (row,) = benchmark.selected(name)
    formed = benchmark.form(row, replace(benchmark.FULL, wide=wide), "cpu")
    regions = [generated.parse(node.args[2], node.args[3])[0] for node in formed.regions]  # type: ignore[arg-type]
    assert sum(map(is_one_pass, regions)) == 1
    assert len(regions) == row.launches


@pytest.mark.parametrize(
    ("name", "wide", "programs"),
    [("swiglu_saved_backward", 14336, 16), ("swiglu_saved_backward", 5632, 32), ("gelu_backward", 14336, 8)],
)
def test_runs_have_as_many_tiles_as_was_fastest(name, wide, programs):
    """Powers of two near to what was fastest on an H200 (16, 16 and 8); 512 or 128 tiles lie below each other."""
    (row,) = benchmark.selected(name)
    formed = benchmark.form(row, replace(benchmark.FULL, wide=wide), "cpu")
    found = [generated.parse(node.args[2], node.args[3]) for node in formed.regions]  # type: ignore[arg-type]
    assert [how.tilings[0].row_programs for region, how in found if is_one_pass(region)] == [programs]


@pytest.mark.skipif(not interpreter.INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize("name", ["experts_forward", "experts_backward"])
@pytest.mark.parametrize("wide", [384, 768, 1024])
def test_kernels_of_experts_have_the_bits_of_the_reference(name, wide):
    interpreter.prepare()
    region, schedule = experts(name, 5, wide)
    assert schedule.tilings[0].held == (wide != 1024)
    kernel = generated.kernel_of(region, schedule, "interpreter")
    inputs = check_kernel.random_inputs(region, [], 4, "cpu")
    assert check_kernel.check(kernel, region, schedule, inputs, []) == []
