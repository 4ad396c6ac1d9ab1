"""Generated optimizer kernels: bit for bit what the reference stores, by Triton's interpreter."""

from __future__ import annotations

import math
import threading

import interpreter
import pytest
import torch
from updates import SIZES, Data, adam, data_for, hard, unscaled

from fp8compile import cuda_capture
from fp8compile.kernels.optimizer import bound_launch, state_transfer, update_launch
from fp8compile.kernels.optimizer import update as reference
from fp8compile.kernels.optimizer.bound_launch import AddressTables, BoundLaunch
from fp8compile.kernels.optimizer.emit_update import UpdateSchedule
from fp8compile.kernels.optimizer.update_spec import Update
from fp8compile.kernels.reference import state_reference

FORMATS = ["log", "e4m3", "e5m2", "e4m3/linear", "e5m2/linear"]
SCHEDULE = UpdateSchedule(groups=16)
WIDE = UpdateSchedule(groups=256)  # all in one tile, which the interpreter runs in the time of one
FEW = (2048, 1, 0, 129, 2300)  # a full tile, less than a group, nothing, a group and a bit, a tile and a bit

pytestmark = pytest.mark.skipif(
    not interpreter.INTERPRETED, reason="needs TRITON_INTERPRET=1, set before Triton's import"
)


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    interpreter.prepare()


def both(update: Update, sizes: tuple[int, ...] = SIZES) -> tuple[Data, Data]:
    mine, theirs = data_for(update, sizes), data_for(update, sizes)
    update_launch.launch(update.to_json(), mine.stored, mine.read, mine.scalars, "interpreter", SCHEDULE)
    reference.run(theirs.stored, theirs.read, theirs.scalars, update.to_json())
    return mine, theirs


def assert_equal(update: Update, mine: Data, theirs: Data) -> None:
    names = [(i, name) for i in update.stored for name in update.slots[i].tensors]
    for k, (x, y) in enumerate(zip(mine.stored, theirs.stored, strict=True)):
        slot, name = names[k % len(names)]
        if name != "counter":
            as_bits = torch.int32 if x.element_size() == 4 else torch.int16 if x.element_size() == 2 else torch.uint8
            assert torch.equal(x.view(as_bits), y.view(as_bits)), (slot, name, k // len(names))


@pytest.mark.parametrize("noise", ["", "/stochastic"])
@pytest.mark.parametrize("name", FORMATS)
def test_states_bit_for_bit(name, noise):
    update = adam(f"{name}{noise}", f"{name}{noise}", root="abs")
    assert_equal(update, *both(update, FEW))


@pytest.mark.parametrize("parameter", ["float32", "bfloat16", "stochastic", "split"])
def test_parameters_bit_for_bit(parameter):
    update = adam("log", "log/stochastic", parameter, "bfloat16", root="abs")
    assert_equal(update, *both(update))


@pytest.mark.parametrize(
    ("name", "positive", "noise"),
    [(name, (i + j) % 2 == 0, noise) for i, name in enumerate(FORMATS) for j, noise in enumerate(("", "/stochastic"))],
)
def test_hard_groups_bit_for_bit(name, positive, noise):
    update, mine = hard(f"{name}{noise}", positive)
    theirs = mine.clone()
    update_launch.launch(update.to_json(), mine.stored, mine.read, mine.scalars, "interpreter", WIDE)
    reference.run(theirs.stored, theirs.read, theirs.scalars, update.to_json())
    assert_equal(update, mine, theirs)


def test_states_in_fp32():
    update = adam("float32", "float32", "split", "bfloat16", root="abs")
    assert_equal(update, *both(update))


@pytest.mark.parametrize("root", ["sigmoid", "tanh"])
def test_functions_come_with_those_that_they_call(root):
    """Sigmoids and tanhs are made of exp and a division, each with a few roundings of 2^-24."""
    mine, theirs = both(adam("float32", "float32", root=root), FEW)
    for x, y in zip(mine.stored, theirs.stored, strict=True):
        assert torch.allclose(x, y, rtol=1e-5, atol=1e-6)


def test_non_finite_values_reach_every_format():
    for name in FORMATS:
        update = adam(name, name)
        mine, theirs = data_for(update, (100, 2048)), data_for(update, (100, 2048))
        for data in (mine, theirs):
            data.read[1][300] = torch.inf
            data.read[1][420] = 2e19  # the square is inf
            data.read[1][900] = torch.nan
        update_launch.launch(update.to_json(), mine.stored, mine.read, mine.scalars, "interpreter", SCHEDULE)
        reference.run(theirs.stored, theirs.read, theirs.scalars, update.to_json())
        k = update.width(update.stored)
        payload, side = mine.stored[k + 1 : k + 3]
        assert side[7, 1].isnan()
        finite = torch.tensor([g != 7 for g in range(len(side))])
        assert side[finite].isfinite().all()
        assert torch.equal(side[finite], theirs.stored[k + 2][finite])
        assert torch.equal(payload.view(-1, 128)[finite], theirs.stored[k + 1].view(-1, 128)[finite])


@pytest.mark.parametrize("parameter", ["bfloat16", "stochastic", "split"])
def test_unscaled_and_skipped(parameter):
    """Bit for bit as the reference, which unscales as GradScaler does; of parameters to skip nothing is written."""
    plain = adam("log", "log/stochastic", parameter, "bfloat16", root="abs")
    update = unscaled(plain)
    mine, theirs, simple = data_for(update, FEW), data_for(update, FEW), data_for(plain, FEW)
    inverse, wide = torch.tensor(3.0 * 2**14).double().reciprocal().float(), update.width(update.stored)
    for data in (mine, theirs):
        for k in range(0, len(data.scalars), 3):
            data.scalars[k + 1], data.scalars[k + 2] = inverse, torch.tensor(float(k // 3 % 2))
    simple.read = [(x.float() * inverse).bfloat16() for x in simple.read]
    before = mine.clone()
    update_launch.launch(update.to_json(), mine.stored, mine.read, mine.scalars, "interpreter", SCHEDULE)
    reference.run(theirs.stored, theirs.read, theirs.scalars, update.to_json())
    assert_equal(update, mine, theirs)
    reference.run(simple.stored, simple.read, simple.scalars, plain.to_json())
    for k, (x, old, wanted) in enumerate(zip(mine.stored, before.stored, simple.stored, strict=True)):
        if k // wide % 2:
            assert torch.equal(x, old)
        elif x.dtype != torch.int32:  # counters, which are advanced by the caller
            assert torch.equal(x, wanted)
    assert any(not torch.equal(x, y) for x, y in zip(mine.stored, before.stored, strict=True))


def test_tensors_that_are_not_contiguous():
    update = adam("log", "log", root="abs")
    mine, theirs = data_for(update, (4096,)), data_for(update, (4096,))
    mine.read[0] = mine.read[0].repeat_interleave(2)[::2]
    storage = torch.zeros(8192)
    storage[::2] = mine.stored[0]
    mine.stored[0] = storage[::2]
    update_launch.launch(update.to_json(), mine.stored, mine.read, mine.scalars, "interpreter", SCHEDULE)
    reference.run(theirs.stored, theirs.read, theirs.scalars, update.to_json())
    assert torch.equal(storage[::2], theirs.stored[0])
    assert storage[1::2].abs().max() == 0


def test_addresses_that_changed_are_sent_again():
    update = adam("log", "log", root="abs")
    mine, theirs = data_for(update, (300,)), data_for(update, (300,))
    for _ in range(2):
        for data in (mine, theirs):
            data.read[0] = data.read[0].clone() * 2
        update_launch.launch(update.to_json(), mine.stored, mine.read, mine.scalars, "interpreter", SCHEDULE)
        reference.run(theirs.stored, theirs.read, theirs.scalars, update.to_json())
    assert_equal(update, mine, theirs)


@pytest.mark.parametrize(("update", "is_light"), [
    (adam("e4m3/linear", "e5m2/linear", "bfloat16", "bfloat16"), True),
    (adam("e4m3/linear", "e5m2/linear", "split", "bfloat16"), False),
    (adam("e4m3/linear", "e5m2/linear", "stochastic", "bfloat16"), False),
    (adam("e4m3/linear", "e5m2/linear", "float32", "float32"), False),
    (adam("e4m3/linear", "e5m2/linear/stochastic", "bfloat16", "bfloat16"), False),
    (adam("e4m3/linear", "log", "bfloat16", "bfloat16"), False),
    (adam("float32", "float32", "bfloat16", "bfloat16"), False),
])  # fmt: skip
def test_simple_updates_have_more_warps(update, is_light):
    schedule = update_launch.schedule_of(update)
    assert schedule == (update_launch.LIGHT if is_light else update_launch.SCHEDULE)
    assert schedule.options("cuda")["maxnreg"] == (96 if is_light else 128)


def test_offsets_are_32_bit_and_addresses_64():
    source = update_launch.file_source(adam("log", "log"), SCHEDULE, "cuda")
    load = source[source.index("def load(") : source.index("def finish(")]
    assert "int64" not in load
    assert "tl.load(x0 + offset, mask=inside" in load
    assert "multiple_of(tl.load(row + 0).to(tl.pointer_type(tl.float32)), 16) + start" in source


@pytest.mark.parametrize(("name", "noise", "dtype"), [
    (name, noise, (torch.float32, torch.bfloat16)[(i + j) % 2])
    for i, name in enumerate(FORMATS) for j, noise in enumerate(("", "/stochastic"))
])  # fmt: skip
def test_states_stored_and_read_by_a_kernel(name, noise, dtype):
    """As the reference does, of sizes that end inside a group."""
    counter = torch.tensor([9], dtype=torch.int32) if noise else None
    for size in (1, 128, 5000):
        x = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
        payload, side = state_transfer.encode_on_gpu(x, f"{name}{noise}", counter, "interpreter")
        codes, ends = state_reference.encode(x, f"{name}{noise}", counter)
        assert torch.equal(payload, codes)
        assert torch.equal(side, ends)
        read = state_transfer.decode_on_gpu(payload, side, f"{name}{noise}", dtype, "interpreter")
        assert torch.equal(read, state_reference.decode(codes, ends, f"{name}{noise}").to(dtype))


def test_a_captured_launch_keeps_what_it_reads(monkeypatch):
    """A CUDA graph copies the table whenever it runs; a step outside of it sends its own."""
    mine = data_for(adam("log", "log", root="abs"), FEW)
    launch = BoundLaunch(adam("log", "log", root="abs").to_json(), mine.stored, mine.read, "interpreter")
    tables, addresses = AddressTables([launch]), [x.data_ptr() for x in mine.read]
    with monkeypatch.context() as captured, cuda_capture.keeping() as kept:
        for module in (bound_launch, cuda_capture):
            captured.setattr(module, "is_capturing", lambda: True)
        tables.read_again(addresses)
        of_graph = launch.table
        assert of_graph.untyped_storage().data_ptr() != tables.table.untyped_storage().data_ptr()
        launch(torch.zeros(len(launch.sizes), len(launch.update.scalars)))
    assert tables.sent is None  # so the next step sends a table, whatever the addresses
    tables.read_again(addresses)
    assert tables.sent == (addresses, [])
    assert launch.table.untyped_storage().data_ptr() == tables.table.untyped_storage().data_ptr()
    assert any(x is of_graph for x in kept)
    launch(torch.zeros(len(launch.sizes), len(launch.update.scalars)))
    assert len(kept) == 5  # on the host; the table, the sizes, the programs, no numbers


def test_tables_of_other_addresses_take_the_place_of_those_before():
    update, spec = adam("log", "log", root="abs"), adam("log", "log", root="abs").to_json()
    numbers = torch.zeros(len(FEW), len(update.scalars))
    sizes = set()
    for _ in range(4):
        mine = data_for(update, FEW)
        update_launch.launch(spec, mine.stored, mine.read, [numbers], "interpreter")
        (tables,) = [t for key, t in update_launch._tables.items() if key[0] == spec]
        sizes.add(len(tables.fixed))
    assert sizes == {2}  # sizes and programs, whatever came before


def test_threads_that_record_keep_their_own(monkeypatch):
    monkeypatch.setattr(cuda_capture, "is_capturing", lambda: True)
    mine, theirs = torch.zeros(1), torch.zeros(1)
    found: list[list[torch.Tensor]] = []

    def record() -> None:
        with cuda_capture.keeping() as kept:
            cuda_capture.keep(theirs)
            found.append(kept)

    with cuda_capture.keeping() as kept:
        thread = threading.Thread(target=record)
        thread.start()
        thread.join()
        cuda_capture.keep(mine)
    assert [x is mine for x in kept] == [True]
    assert [x is theirs for x in found[0]] == [True]


def test_so_does_one_of_tensors_that_a_kernel_cannot_take(monkeypatch):
    """The tables of an ordinary step are others: what a graph copies is not there before it runs."""
    update, spec = adam("log", "log", root="abs"), adam("log", "log", root="abs").to_json()
    mine, theirs = data_for(update, FEW), data_for(update, FEW)
    numbers = torch.zeros(len(FEW), len(update.scalars))
    update_launch.launch(spec, mine.stored, mine.read, [numbers], "interpreter")
    (before,) = [t for key, t in update_launch._tables.items() if key[0] == spec]
    with monkeypatch.context() as captured, cuda_capture.keeping() as kept:
        for module in (update_launch, cuda_capture):
            captured.setattr(module, "is_capturing", lambda: True)
        update_launch.launch(spec, mine.stored, mine.read, [numbers], "interpreter")
        assert any(x is before.table for x in kept)
        update_launch.launch(spec, theirs.stored, theirs.read, [numbers], "interpreter")
    after = [t for key, t in update_launch._tables.items() if key[0] == spec]
    assert len(after) == 1
    assert after[0] is before
    addresses = [x.data_ptr() for x in theirs.read]
    tables = [x for x in kept if x.dim() == 1 and set(addresses) <= set(x.tolist())]
    assert len(tables) == 2  # on the host, from which a graph copies whenever it runs, and on the device


@pytest.mark.parametrize("noise", ["", "/stochastic"])
def test_a_launch_that_is_made_again(noise):
    """New gradients, numbers with rows to spare, and a parameter that is left out for a step."""
    update = adam(f"log{noise}", f"log{noise}", root="abs")
    mine, theirs = data_for(update, FEW), data_for(update, FEW)
    launch = BoundLaunch(update.to_json(), mine.stored, mine.read, "interpreter")
    tables = AddressTables([launch])
    count = len(launch.sizes)
    wide, narrow, each = len(mine.stored) // count, len(mine.read) // count, len(mine.scalars) // count
    for step in range(3):
        read = [x + step for x in mine.read]
        numbers = torch.stack([x.float() for x in mine.scalars]).view(count, each)
        tables.read_again([x.data_ptr() for x in read])
        left_out = 4 if step == 1 else -1  # the one of 2300 elements
        launch.update_only(tuple(i != left_out for i in range(count)))
        launch(torch.cat([numbers, numbers]))
        members = [i for i in range(count) if i != left_out]
        stored = [theirs.stored[i * wide + k] for i in members for k in range(wide)]
        others = [read[i * narrow + k] for i in members for k in range(narrow)]
        reference.run(stored, others, [numbers[members]], update.to_json())
        mine_stored = [mine.stored[i * wide + k] for i in members for k in range(wide)]
        reference.count(update, reference.counters_of(update, mine_stored), [])  # a launch leaves that to its caller
        assert_equal(update, mine, theirs)


def test_tables_of_several_launches():
    """An odd number of addresses and gradients that one of them alone reads anew: each launch finds its own."""
    wide, narrow = adam("log", "log/stochastic", root="abs"), adam("float32", "float32", root="abs")
    updates, datas = (wide, narrow, wide), [data_for(u, (129, 7, 300)) for u in (wide, narrow, wide)]
    theirs = [data.clone() for data in datas]
    launches = [
        BoundLaunch(u.to_json(), data.stored, data.read, "interpreter") for u, data in zip(updates, datas, strict=True)
    ]
    tables = AddressTables(launches, settings=3)
    seen = tables.numbers
    for step in range(2):
        read = [[x * (step + 1) for x in data.read] for data in datas]
        settings = [0.1 * (step + 1), 2, -3e-300]
        tables.read_again([x.data_ptr() for xs in read for x in xs], settings)
        assert [x.item() for x in seen] == settings  # in the memory where they were, and in 64 bits
        for u, launch, data, own, xs in zip(updates, launches, datas, theirs, read, strict=True):
            numbers = torch.stack([x.float() for x in data.scalars]).view(len(launch.sizes), -1)
            launch(numbers)
            reference.count(u, reference.counters_of(u, data.stored), [])  # a launch leaves that to its caller
            reference.run(own.stored, xs, [numbers], u.to_json())
            assert_equal(u, data, own)
    starts = [x.table.storage_offset() for x in launches]
    assert all(start % 2 == 0 for start in starts)  # 16 bytes


SHAPES = ((2, 3, 5, 7), (1, 130, 4, 4), (32, 16, 3, 3), (40, 60))


def turned(x: torch.Tensor) -> torch.Tensor:
    """The same values: images in channels-last layout, a matrix transposed."""
    return x.to(memory_format=torch.channels_last) if x.dim() == 4 else x.t().contiguous().t()


@pytest.mark.parametrize(
    ("parameter", "states"),
    [("float32", "log"), ("bfloat16", "float32"), ("stochastic", "log"), ("split", "e4m3/linear/stochastic")],
)
def test_parameters_that_lie_transposed(parameter, states):
    """Bit for bit as contiguous ones; a tile that is full, one that is not, less than a group; plain states as well."""
    update = adam(states, states, parameter, "bfloat16", root="abs")
    sizes = tuple(math.prod(shape) for shape in SHAPES)
    mine, theirs = data_for(update, sizes), data_for(update, sizes)
    names = [name for i in update.stored for name in update.slots[i].tensors]
    for k, x in enumerate(mine.stored):
        if names[k % len(names)] == "x":
            mine.stored[k] = turned(x.view(SHAPES[k // len(names)]))
    read = [turned(x.view(shape)) for x, shape in zip(mine.read, SHAPES, strict=True)]
    matrices = bound_launch.matrices_of(update, mine.stored, mine.stored[:: len(names)])
    assert matrices == [(3, 35), (130, 16), (16, 9), (40, 60)]
    launch = BoundLaunch(update.to_json(), mine.stored, read, "interpreter", matrices)
    numbers = torch.stack([x.float() for x in mine.scalars]).view(len(sizes), -1)
    launch(numbers)
    reference.run(theirs.stored, theirs.read, [numbers], update.to_json())
    mine.stored = [x.contiguous().view(y.shape) for x, y in zip(mine.stored, theirs.stored, strict=True)]
    assert_equal(update, mine, theirs)
