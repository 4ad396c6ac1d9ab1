"""The text of generated kernels: masks and wide offsets only where they are needed, names, headers, files."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
from pathlib import Path

import casts
import interpreter
import pytest
import regions
import torch
from casts import Cast
from ranks import copies

from fp8compile.kernels.check import check_kernel
from fp8compile.kernels.check.trial_sizes import pick_sizes
from fp8compile.kernels.codegen import generated
from fp8compile.kernels.codegen.emit.kernel import kernel_source
from fp8compile.kernels.codegen.schedule import choose_schedule
from fp8compile.kernels.codegen.schedule.tiling import Schedule, Tiling
from fp8compile.kernels.codegen.source.printer import lines_of
from fp8compile.kernels.codegen.source.statements import (
    Add,
    Assign,
    Call,
    For,
    If,
    Name,
    Write,
    expr,
    names_assigned,
    names_read,
    replaced,
)
from fp8compile.kernels.codegen.spec.region import Buffer, Input, Part, Region, Size, Store, Value
from fp8compile.kernels.reference import region_reference


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the files of this test go."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    generated.module_of.cache_clear()
    return tmp_path / "fp8compile" / "kernels"


def copy(rows: Size, cols: int, **kwargs: int) -> Region:
    """y = x, BF16, contiguous."""
    where = Input(0, "bfloat16", ((rows, cols),), ((cols, 1),))
    part = Part(rows, cols, (where,), (Value("load", (), (0,)),), (Store(0, 0, cols),), **kwargs)
    return Region((part,), (Buffer((rows, cols), "bfloat16"),))


def source(region: Region, block_rows: int, block_cols: int) -> str:
    part = region.parts[0]
    rows = part.rows if isinstance(part.rows, int) else 4 * block_rows
    tiling = Tiling(block_rows, block_cols, -(-rows // block_rows), -(-part.cols // block_cols))
    return kernel_source(region, Schedule((tiling,)), "kernel", "cuda")


def row_cast(rows: Size, cols: int) -> Region:
    """A payload and a scale for each row."""
    where = Input(0, "bfloat16", ((rows, cols),), ((cols, 1),))
    values = (
        Value("load", (), (0,)), Value("row_amax", (0,)), Value("scale", (1,), ("e4m3",)),
        Value("quantize", (0, 2), ("e4m3",)),
    )  # fmt: skip
    part = Part(rows, cols, (where,), values, (Store(0, 3, cols), Store(1, 2)))
    return Region((part,), (Buffer((rows, cols), "float8_e4m3fn"), Buffer((rows, 1), "float32")))


# ---- masks ----------------------------------------------------------------------------------------------------------


def test_no_mask_where_tiles_divide() -> None:
    assert "mask" not in source(copy(64, 256), 16, 128)
    assert "<" not in source(copy(64, 256), 16, 128)


@pytest.mark.parametrize(
    ("rows", "cols", "masked"), [(65, 256, {"rows < 65"}), (64, 250, {"cols < 250"}), (3, 5, {"rows < 3", "cols < 5"})]
)
def test_mask_where_tiles_do_not(rows: int, cols: int, masked: set[str]) -> None:
    assert set(re.findall(r"(?:rows|cols) < \d+", source(copy(rows, cols), 16, 128))) == masked


@pytest.mark.parametrize(("cols", "tile"), [(14336, 2048), (5120, 1024), (768, 256), (11008, 4096)])
def test_wide_rows_are_held_in_as_little_as_covers_them(cols: int, tile: int) -> None:
    region = row_cast(8, cols)
    schedule = choose_schedule.choose(region)
    (tiling,) = schedule.tilings
    assert (tiling.held, tiling.block_cols, tiling.programs) == (True, tile, 8)
    text = kernel_source(region, schedule, "kernel", "cuda")
    assert ("mask" in text) == (cols % tile > 0)
    assert text.count("= load_tile(") == text.count("store_tile2(") - 1 == -(-cols // tile)
    assert not choose_schedule.choose(row_cast(8, 4096)).tilings[0].held


def doubled_and_cast(rows: Size, cols: int) -> Region:
    """Twice a tensor in BF16, and the payload and scales of its rows."""
    where = Input(0, "bfloat16", ((rows, cols),), ((cols, 1),))
    values = (
        Value("load", (), (0,)), Value("row_amax", (0,)), Value("scale", (1,), ("e4m3",)),
        Value("quantize", (0, 2), ("e4m3",)), Value("add", (0, 0)),
    )  # fmt: skip
    part = Part(rows, cols, (where,), values, (Store(0, 3, cols), Store(1, 2), Store(2, 4, cols)))
    buffers = Buffer((rows, cols), "float8_e4m3fn"), Buffer((rows, 1), "float32"), Buffer((rows, cols), "bfloat16")
    return Region((part,), buffers)


@pytest.mark.parametrize(("cols", "is_held"), [(14336, True), (4096, False), (8192, False)])
def test_what_is_known_before_rows_are_reduced_is_stored_before(cols: int, is_held: bool) -> None:
    """Or registers would hold it meanwhile, which spill."""
    region = doubled_and_cast(8, cols)
    schedule = choose_schedule.choose(region)
    assert schedule.tilings[0].held == is_held
    text = kernel_source(region, schedule, "kernel", "cuda")
    stored, reduced = text.index("tl.store(y2"), text.index("def store_tile2" if is_held else "tl.max(")
    assert stored < reduced
    assert reduced < text.index("tl.store(y0")
    assert text.count("tl.store(y2") == 1


def test_of_the_widest_tiles_it_is_not() -> None:
    region = doubled_and_cast(8, 16384)
    text = kernel_source(region, choose_schedule.choose(region), "kernel", "cuda")
    assert text.index("tl.max(") < text.index("tl.store(y2")


@pytest.mark.skipif(not interpreter.INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize("cols", [1024, 1536])
def test_what_is_stored_before_has_the_bits_of_the_reference(cols: int) -> None:
    interpreter.prepare()
    region = doubled_and_cast("n0", cols)
    schedule = choose_schedule.choose(region)
    kernel = generated.kernel_of(region, schedule, "interpreter")
    inputs = check_kernel.random_inputs(region, [5], 4, "cpu")
    assert check_kernel.check(kernel, region, schedule, inputs, [5]) == []


@pytest.mark.skipif(not interpreter.INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize("cols", [1536, 1600])
def test_rows_that_are_held_have_the_bits_of_the_reference(cols: int) -> None:
    interpreter.prepare()
    region = row_cast("n0", cols)
    schedule = choose_schedule.choose(region)
    assert schedule.tilings[0].held
    kernel = generated.kernel_of(region, schedule, "interpreter")
    inputs = check_kernel.random_inputs(region, [5], 4, "cpu")
    assert check_kernel.check(kernel, region, schedule, inputs, [5]) == []


def divided_by_more_than_one(numerator: Value) -> Region:
    """y = numerator / (1 + exp(-x)), FP32 [rows n0, 64]."""
    values = (
        Value("load", (), (0,)), Value("neg", (0,)), Value("exp", (1,)), Value("constant", (), (1.0,)),
        Value("add", (2, 3)), numerator, Value("div", (5, 4)),
    )  # fmt: skip
    where = Input(0, "float32", (("n0", 64),), ((64, 1),))
    return Region((Part("n0", 64, (where,), values, (Store(0, 6, 64),)),), (Buffer(("n0", 64), "float32"),))


@pytest.mark.skipif(not interpreter.INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize(
    ("numerator", "helper"),
    [
        (Value("constant", (), (1.0,)), "fast_inverse"),
        (Value("constant", (), (2.0,)), "fast_div"),
        (Value("load", (), (0,)), "fast_div"),
    ],
    ids=["1", "2", "x"],
)
def test_where_one_is_divided_an_inverse_is_all(numerator: Value, helper: str) -> None:
    interpreter.prepare()
    region = divided_by_more_than_one(numerator)
    schedule = choose_schedule.choose(region)
    text = kernel_source(region, schedule, "kernel", "cuda")
    assert [name for name in ("fast_inverse", "fast_div") if f"= {name}(" in text] == [helper]
    kernel = generated.kernel_of(region, schedule, "interpreter")
    inputs = check_kernel.random_inputs(region, [5], 4, "cpu")
    assert check_kernel.check(kernel, region, schedule, inputs, [5]) == []


# ---- walks ----------------------------------------------------------------------------------------------------------


def with_amax(rows: Size, transposed: bool) -> Region:
    """y = x, or transposed; and its amax, in pieces."""
    where = Input(0, "bfloat16", ((rows, 128),), ((128, 1),))
    stores = (Store(0, 0, rows if transposed else 128, transposed=transposed), Store(1, 1))
    part = Part(rows, 128, (where,), (Value("load", (), (0,)), Value("all_amax", (0,))), stores)
    shape = (128, rows) if transposed else (rows, 128)
    return Region((part,), (Buffer(shape, "bfloat16"), Buffer(("programs0",), "float32")))


def walked(region: Region, programs: int) -> str:
    """Return the tiles of 32 rows that a program walks over."""
    text = kernel_source(region, Schedule((Tiling(32, 128, programs, 1),)), "kernel", "cuda")
    (found,) = re.findall(r"for row_block in range\((.*)\):", text)
    return found


def test_tiles_that_are_stored_transposed_are_walked_over_in_runs() -> None:
    """So that a program fills up the lines of memory of which each tile has a few bytes."""
    assert walked(with_amax(512, True), 4) == "pid * 4, (pid + 1) * 4"
    assert walked(with_amax(512, True), 5) == "pid * 4, tl.minimum((pid + 1) * 4, 16)"
    assert walked(with_amax(512, False), 4) == "pid, 16, 4"
    span = "tl.cdiv(tl.cdiv(n0, 32), 4)"
    assert walked(with_amax("n0", True), 4) == f"pid * {span}, tl.minimum((pid + 1) * {span}, tl.cdiv(n0, 32))"


@pytest.mark.skipif(not interpreter.INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize("rows", [1, 160, 161, 512])
@pytest.mark.parametrize("programs", [1, 3, 5, 7])
@pytest.mark.parametrize("is_known", [True, False])
def test_runs_have_every_tile_once(rows: int, programs: int, is_known: bool) -> None:
    """Also where some programs have none, or the last has fewer."""
    interpreter.prepare()
    region, sizes = with_amax(rows if is_known else "n0", True), [] if is_known else [rows]
    schedule = Schedule((Tiling(32, 128, min(programs, -(-rows // 32)) if is_known else programs, 1),))
    kernel = generated.kernel_of(region, schedule, "interpreter")
    inputs = check_kernel.random_inputs(region, sizes, 4, "cpu")
    assert check_kernel.check(kernel, region, schedule, inputs, sizes) == []


def test_symbolic_rows_are_masked_unless_known_to_divide() -> None:
    assert "rows < n0" in source(copy("n0", 256, row_divisor=8), 16, 128)
    assert "mask" not in source(copy("n0", 256, row_divisor=16), 16, 128)


def test_one_store_pads_and_another_does_not() -> None:
    """The second must not write the zeros of the first, although the tiles cover them."""
    part = copy(32, 16).parts[0]
    padded, exact = Store(0, 0, 64, row_multiple=64, col_multiple=64), Store(1, 0, 16)
    part = Part(part.rows, part.cols, part.inputs, part.values, (padded, exact))
    region = Region((part,), (Buffer((64, 64), "bfloat16"), Buffer((32, 16), "bfloat16")))
    text = kernel_source(region, Schedule((Tiling(16, 16, 4, 4),)), "kernel", "cuda")
    stores = [line for line in text.splitlines() if "tl.store" in line]
    assert "mask" not in stores[0]
    assert "tl.where((rows < 32) & (cols < 16), v0, 0)" in stores[0]
    assert "rows < 32" in stores[1]
    assert "cols < 16" in stores[1]


@pytest.mark.skipif(not interpreter.INTERPRETED, reason="runs kernels on the CPU")
@pytest.mark.parametrize("rows", [0, "n0"])
def test_no_rows(rows: Size) -> None:
    """A kernel without rows reads and writes nothing, and what it accumulates is 0."""
    interpreter.prepare()
    part = copy(rows, 16).parts[0]
    values = (*part.values, Value("all_amax", (0,)), Value("col_sum", (0,)))
    stores = (*part.stores, Store(1, 1), Store(2, 2))
    part = Part(part.rows, part.cols, part.inputs, values, stores)
    buffers = (
        Buffer((rows, 16), "bfloat16"),
        Buffer(("programs0",), "float32"),
        Buffer(("row_programs0", 16), "float32"),
    )
    region = Region((part,), buffers)
    schedule = Schedule((Tiling(16, 16, 1, 1),))
    sizes = [0] if rows == "n0" else []
    _, amax, total = generated.launch(region, schedule, [torch.ones(0)], sizes, "interpreter")
    assert (amax == 0).all()
    assert (total == 0).all()


# ---- offsets --------------------------------------------------------------------------------------------------------


def test_wide_offsets_only_beyond_2_31_elements() -> None:
    assert "int64" not in source(copy(2**15, 2**15), 16, 128)
    assert source(copy(2**16, 2**16), 16, 128).count("rows.to(tl.int64)") == 2


def test_wide_offsets_of_columns() -> None:
    """The rows of a transposed input lie side by side: it is the columns that go far."""
    rows, cols = 2**16, 2**16
    part = copy(rows, cols).parts[0]
    turned = Input(0, "bfloat16", ((rows, 1),), ((cols, rows),))
    part = Part(rows, cols, (turned,), part.values, (Store(0, 0, rows, transposed=True),))
    text = source(Region((part,), (Buffer((cols, rows), "bfloat16"),)), 16, 128)
    assert f"cols.to(tl.int64) * {rows}" in text
    assert f"cols_t.to(tl.int64) * {rows}" in text


def test_wide_offsets_where_sizes_are_unknown() -> None:
    assert "rows.to(tl.int64)" in source(copy("n0", 256), 16, 128)


# ---- names and headers ----------------------------------------------------------------------------------------------


def test_equal_regions_have_equal_names() -> None:
    first, again, other = copy(64, 256), copy(64, 256), copy(64, 128)
    names = [generated.kernel_name(r, choose_schedule.choose(r)) for r in (first, again, other)]
    assert names[0] == names[1] != names[2]


def test_name_says_what_it_does() -> None:
    region = Cast("e4m3", "row").region()
    assert re.fullmatch(
        r"rows_e4m3_transposed_[0-9a-f]{8}", generated.kernel_name(region, choose_schedule.choose(region))
    )


def test_header() -> None:
    cast = Cast("e5m2", "group(16)")
    region = Region(cast.region().parts, cast.region().buffers, ('model.py:12 in forward, "x = self.up(x)"',))
    text = generated.file_source(region, choose_schedule.choose(region))
    header = text.split('"""')[1]
    elements = casts.ROWS * casts.COLS
    assert 'from     model.py:12 in forward, "x = self.up(x)"' in header
    assert f"space    128 rows x 256 cols, {4 * elements + 2 * elements + 4 * elements // 16} bytes" in header
    assert "reads    x0: float32, rows ((128, 256),), cols ((256, 1),)" in header
    assert "writes   y0: float8_e5m2[128, 256]" in header
    assert "writes   y1: float8_e5m2[256, 128], transposed" in header
    assert "libdevice" not in text


@pytest.mark.parametrize("line", ['x = f(x, """a string""")', r'x = f(x, "C:\users\x")'])
def test_a_line_in_the_header_may_have_any_string(line: str) -> None:
    parts = Cast("e5m2", "group(16)").region()
    region = Region(parts.parts, parts.buffers, (f"model.py:12  {line}",))
    tree = ast.parse(generated.file_source(region, choose_schedule.choose(region)))
    assert f"from     model.py:12  {line}\n" in (ast.get_docstring(tree) or "")


def test_only_what_is_needed_is_written() -> None:
    text = generated.file_source(copy(64, 256), choose_schedule.choose(copy(64, 256)))
    assert text.count("@triton.jit") == 1


# ---- statements -----------------------------------------------------------------------------------------------------


def test_a_name_is_replaced_where_it_is_read_and_nowhere_else() -> None:
    row_block, first, pid = Name("row_block"), Name("first_row_block"), Name("pid")
    inner = Assign(Name("v1"), expr("{} + {}", row_block, first))
    loop = For(Name("col_block"), expr("range({})", row_block), (inner, Write(Name("y0"), Name("v1"), row_block)))
    text = "\n".join(lines_of(replaced(loop, {row_block: pid})))
    assert text == "for col_block in range(pid):\n    v1 = pid + first_row_block\n    tl.store(y0, v1, mask=pid)"
    assert names_read([loop]) == {row_block, first, Name("y0"), Name("v1")}
    assert names_assigned([loop]) == {Name("col_block"), Name("v1")}


def test_branches_and_sums_are_written_with_what_they_read() -> None:
    total, x, n = Name("acc0"), Name("v0"), Name("n0")
    branches = If(((expr("{} < 4", n), (Add(total, x),)), (None, (Call(expr("part1({})", x)),))))
    assert lines_of(branches) == ["if n0 < 4:", "    acc0 += v0", "else:", "    part1(v0)"]
    assert names_read([branches]) == {total, x, n}
    assert names_assigned([branches]) == {total}


# ---- files ----------------------------------------------------------------------------------------------------------


def written(folder: Path) -> list[Path]:
    """What lies there, but for what Python itself keeps of modules."""
    return sorted(path for path in folder.iterdir() if path.name != "__pycache__")


def test_a_file_is_written_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    region = copy(64, 256)
    schedule = choose_schedule.choose(region)
    generated.kernel_of(region, schedule)
    (file,) = written(folder)
    assert file.name.startswith(generated.kernel_name(region, schedule))
    generated.module_of.cache_clear()
    monkeypatch.setattr(generated, "write_atomically", lambda *_: pytest.fail("written again"))
    assert generated.kernel_of(region, schedule) is not None


def _write(arguments: tuple[str, int]) -> int:
    """In a process of its own: make the same kernels, in another order, and return how many it could import."""
    folder, start = arguments
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    sizes = [16 * (1 + (start + i) % 8) for i in range(8)]
    return sum(callable(generated.kernel_of(copy(n, n), choose_schedule.choose(copy(n, n))).__getitem__) for n in sizes)


def test_processes_may_write_the_same_files(tmp_path: Path, folder: Path) -> None:
    with copies().Pool(2) as pool:
        assert pool.map(_write, [(str(tmp_path), i) for i in range(2)], chunksize=1) == [8] * 2
    files = written(folder)
    assert len(files) == 8  # and no temporary file is left
    for file in files:
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_sizes_for_a_trial_fit_together() -> None:
    """n0 rows are n1 batches: what main() picks must be a shape that the reference can evaluate."""
    for seed in range(100):
        draw = regions.draw(seed)
        if not draw.region.sizes:
            continue
        names = pick_sizes(draw.region, about=64)
        sizes = [names[n] for n in draw.region.sizes]
        inputs = check_kernel.random_inputs(draw.region, sizes, 0, "cpu")
        for part in draw.region.parts:
            values = region_reference.Evaluation(part, inputs, names)
            for store in part.stores:
                assert values[store.value] is not None


def test_whole_rows_in_groups_of_rows_are_swept_where_a_tile_of_them_would_not_fit() -> None:
    found = regions.draw(10037, large=True)  # rows of 1000, reduced, and amaxes of 64 rows
    assert [(t.block_rows, t.block_cols) for t in found.schedule.tilings if t.sweeps] == [(64, 256)]
    assert choose_schedule.fits(found.schedule)
