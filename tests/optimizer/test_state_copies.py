"""Every way to copy an 8-bit state keeps all bits or raises; files that are not what was saved are refused."""

from __future__ import annotations

import copy
import ctypes
import io
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions

from fp8compile import FP8State
from fp8compile.errors import StateError
from fp8compile.optimizer import state_checks

PARTS = ("payload", "side", "counter", "low")
KINDS = {  # format, rounding of the parameter, dtype
    "all parts": ("log/stochastic", "split", torch.bfloat16),
    "no counter": ("e4m3", "nearest", torch.float32),
    "exact": ("float32", "stochastic", torch.bfloat16),
}


def make(kind: str = "all parts", zeros: bool = False) -> FP8State:
    """Three groups and a part of one; a counter and missing bits that are not those of a new state."""
    format, rounding, dtype = KINDS[kind]
    x = torch.randn(7, 60, generator=torch.Generator().manual_seed(0)) * (not zeros)
    state = FP8State.of(x, rounding, format=format, salt=7, dtype=dtype)
    if not zeros and state.low is not None:
        state.low.random_(-(1 << 15), 1 << 15)
    if not zeros and state.counter is not None:
        state.counter.add_(1000)
    return state


def assert_same(a: FP8State, b: Any) -> None:
    assert type(b) is FP8State
    assert (a.format, a.parameter, a.dtype, a.shape) == (b.format, b.parameter, b.dtype, b.shape)
    for name in PARTS:
        x, y = getattr(a, name), getattr(b, name)
        assert (x is None) == (y is None), name
        assert x is None or torch.equal(x, y), name


def memory(state: FP8State) -> set[int]:
    return {x.data_ptr() for x in state.parts() if x.numel()}


# ---- ways that are exact --------------------------------------------------------------------------------------------


def saved(zipped: bool) -> Callable[[FP8State], Any]:
    def way(state: FP8State) -> Any:
        file = io.BytesIO()
        torch.save(state, file, _use_new_zipfile_serialization=zipped)
        return torch.load(io.BytesIO(file.getvalue()), weights_only=True)

    return way


def through_queue(state: FP8State) -> Any:
    queue = mp.get_context("spawn").SimpleQueue()
    queue.put(state)
    return queue.get()


def filled(blank: Callable[[FP8State], Tensor]) -> Callable[[FP8State], Any]:
    return lambda state: blank(state).copy_(state)


def offloaded(state: FP8State) -> Any:
    """The way of many trainers: the object stays, its memory moves."""
    state.data = state.data.to("cpu", non_blocking=True)
    return state


def taken_over(state: FP8State) -> Any:
    other = FP8State.of(torch.zeros(7, 60), state.parameter, format=state.format, dtype=state.dtype)
    other.data = state
    return other


@pytest.mark.parametrize("way", [copy.copy, lambda state: state.detach(), lambda state: state.rows(0, 0, 128)])
def test_a_copy_that_moves_leaves_the_state_where_it_is(way: Callable[[FP8State], FP8State]) -> None:
    state = FP8State.of(torch.full((128, 8), 2.0), "stochastic", format="log/stochastic")
    where = [x.data_ptr() for x in state.parts()]
    made = way(state)
    assert [x.data_ptr() for x in made.parts()] == where
    made.data = FP8State.of(torch.full((128, 8), 5.0), "stochastic", format="log/stochastic")
    assert [x.data_ptr() for x in state.parts()] == where
    assert torch.equal(state.dequantize(), torch.full((128, 8), 2.0))
    assert torch.equal(made.dequantize(), torch.full((128, 8), 5.0))


def averaged(state: FP8State) -> Any:
    """The first average of weights is a copy of them."""
    model = nn.Module()
    model.register_buffer("state", state)
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    average.update_parameters(model)
    return average.module.state


def staged(stager: Any) -> Callable[[FP8State], Any]:
    def way(state: FP8State) -> Any:
        for _ in range(2):  # the second time from its cache
            found = stager().stage({"s": [state]})
            found = found if isinstance(found, dict) else found.result()
        return found["s"][0]

    return way


EXACT = {
    "copy.deepcopy": copy.deepcopy,
    "copy.copy": copy.copy,
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),
    "torch.save": saved(True),
    "torch.save, old format": saved(False),
    "multiprocessing queue": through_queue,
    "share_memory_": lambda state: state.clone().share_memory_(),
    "to a device": lambda state: state.to("cpu", copy=True),
    "cpu": lambda state: state.cpu(),
    "clone": lambda state: state.clone(memory_format=torch.preserve_format),
    "detach": lambda state: state.detach(),
    "data": lambda state: state.data,
    "data, written": taken_over,
    "data, offloaded": offloaded,
    "contiguous": lambda state: state.contiguous(),
    "Parameter": lambda state: nn.Parameter(state, requires_grad=False).data,
    "empty_like": filled(torch.empty_like),
    "zeros_like": filled(torch.zeros_like),
    "empty_like on a device": filled(lambda state: torch.empty_like(state, device="cpu")),
    "new_empty": filled(lambda state: state.new_empty(state.shape)),
    "new_zeros": filled(lambda state: state.new_zeros(state.shape)),
    "AveragedModel": averaged,
    "DefaultStager": staged(lambda: DefaultStager(StagingOptions(False, False, False, False))),
    "DefaultStager, shared": staged(lambda: DefaultStager(StagingOptions(False, True, False, False))),
    "DefaultStager, in a thread": staged(lambda: DefaultStager(StagingOptions(False, False, True, False))),
    "BlockingAsyncStager": staged(BlockingAsyncStager),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", EXACT)
def test_exact(way: str, kind: str) -> None:
    state = make(kind)
    expected = make(kind)
    expected.low = None if state.low is None else state.low.clone()
    assert_same(expected, EXACT[way](state))
    assert_same(expected, state)


@pytest.mark.parametrize("kind", KINDS)
def test_async_save(kind: str, tmp_path: Path) -> None:
    state = make(kind)
    saving = dcp.async_save({"s": state}, checkpoint_id=tmp_path, no_dist=True)
    expected = state.clone()
    saving.result()  # type: ignore[union-attr]
    target = {"s": make(kind, zeros=True)}
    dcp.load(target, checkpoint_id=tmp_path, no_dist=True)
    assert_same(expected, target["s"])


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_are_zeros(kind: str) -> None:
    blank = torch.zeros_like(make(kind))
    assert type(blank) is FP8State
    assert not blank.dequantize().any()


def test_a_copy_shares_memory_where_it_does_for_tensors() -> None:
    state = make()
    for way in ("copy.copy", "detach", "data", "contiguous"):
        assert memory(EXACT[way](state)) == memory(state), way
    for way in ("copy.deepcopy", "clone", "DefaultStager", "to a device", "torch.save"):
        assert not memory(EXACT[way](state)) & memory(state), way
    shared = state.clone().share_memory_()
    assert shared.is_shared()
    assert not state.is_shared()
    received = through_queue(shared)
    shared.payload.zero_()
    assert not received.payload.any()


def test_another_format_keeps_what_belongs_to_the_parameter() -> None:
    """As resuming by torch.distributed.checkpoint with another recipe does."""
    source, target = make(), FP8State.of(torch.zeros(7, 60), "split", format="e4m3", dtype=torch.bfloat16)
    target.copy_(source)
    assert source.low is not None
    assert target.low is not None
    assert torch.equal(target.low, source.low)
    assert torch.allclose(target.dequantize(), source.dequantize(), rtol=0.07)  # half a step of e4m3: 1 / 16


def test_rows_and_columns_are_put_together() -> None:
    """As DTensor gathers shards: uneven ones are filled up with zeros, columns are cut out of rows."""
    whole = FP8State.of(torch.randn(5, 256), "split", format="log/stochastic", dtype=torch.bfloat16)
    assert whole.low is not None
    whole.low.random_(-9, 9)
    for rows in (0, 3, 5):
        padded = torch.nn.functional.pad(whole[:rows], [0, 0, 0, 5 - rows])
        assert type(padded) is FP8State
        padded.check()
        assert_same(whole[:rows].clone(), padded[:rows].clone())
        assert not padded[rows:].dequantize().any()
    none = whole.new_zeros(0, 256)
    assert_same(whole[:0].clone(), none)
    exact = make("exact")
    assert_same(exact, torch.cat([x.clone() for x in exact.split(3)]))
    for plain in (torch.cat([whole, whole]), torch.nn.functional.pad(whole, [0, 3]), torch.stack([exact, exact])):
        assert type(plain) is Tensor  # something is computed
    assert torch.nn.functional.pad(whole, [0, 0, 0, 1], value=2.0)[-1].eq(2).all()


# ---- ways that are refused ------------------------------------------------------------------------------------------


def with_safetensors(state: FP8State) -> Any:
    return pytest.importorskip("safetensors.torch").save({"s": state})


REFUSED = {
    "safetensors": (with_safetensors, "its storage is asked for.*plain_state_dict"),
    "storage": (lambda state: state.storage(), "its storage is asked for"),
    "untyped_storage": (lambda state: state.untyped_storage().clone(), "invalid python storage"),
    "bytes of untyped_storage": (lambda state: bytes(state.untyped_storage()), "not allocated"),
    "memory address": (lambda state: ctypes.string_at(state.untyped_storage().data_ptr(), 8), "invalid python storage"),
    "set_": (lambda state: torch.empty(0, dtype=state.dtype).set_(state), "no memory of its own"),
    "numpy": (lambda state: state.numpy(), "not supported for tensor subclasses"),
    "dlpack": (torch.from_dlpack, "exported by dlpack"),
    "tolist": (lambda state: state.tolist(), "not supported for tensor subclasses"),
    "view": (lambda state: state.view(-1), "what is written to a view would be lost"),
    "data of a plain tensor": (lambda state: setattr(state, "data", torch.zeros(7, 60)), "copy_ into it"),
    "data of another format": (lambda state: setattr(state, "data", make("no counter")), "copy_ into it"),
}


@pytest.mark.parametrize("way", REFUSED)
def test_refused(way: str) -> None:
    function, message = REFUSED[way]
    with pytest.raises((StateError, RuntimeError), match=re.compile(message, re.DOTALL)):
        function(make())


@pytest.mark.parametrize("kind", KINDS)
def test_plain_tensors_hold_what_a_state_stands_for_but_no_missing_bits(kind: str, tmp_path: Path) -> None:
    """Reading is a computation; a file that is converted loses no bits of a parameter."""
    state = make(kind)
    plain = torch.empty(state.shape, dtype=state.dtype).copy_(state)
    assert torch.equal(plain, state.dequantize())
    dcp.save({"s": state}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    if state.low is not None:
        with pytest.raises(CheckpointException, match=r"16 more bits .* would be lost"):
            dcp_to_torch_save(tmp_path / "dcp", tmp_path / "c.pt")
        assert not (tmp_path / "c.pt").exists()
    else:
        dcp_to_torch_save(tmp_path / "dcp", tmp_path / "c.pt")
        assert torch.equal(torch.load(tmp_path / "c.pt")["s"], plain)


# ---- files ----------------------------------------------------------------------------------------------------------


def test_files_of_0_1_0_are_read() -> None:
    """They have no checksum."""
    file = io.BytesIO()
    state = make()
    torch.save(state, file)
    assert type(state).__reduce_ex__(state, 2)[1][-1] == state_checks.checksum(state)

    class Old(FP8State):
        def __reduce_ex__(self, protocol: Any) -> Any:
            function, arguments = super().__reduce_ex__(protocol)
            return function, arguments[:-1]

    file = io.BytesIO()
    torch.save(Old(*state._arguments()), file)
    assert_same(state, torch.load(io.BytesIO(file.getvalue()), weights_only=True))


def changed_file(source: Path, target: Path, part: Tensor, at: int) -> None:
    """Change a bit of the `at`th byte of the record that holds `part`."""
    data = bytes(part.contiguous().view(-1).view(torch.uint8).tolist())
    damaged = 0
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as new:
        for name in old.namelist():
            record = old.read(name)
            if record == data:
                record, damaged = record[:at] + bytes([record[at] ^ 1]) + record[at + 1 :], damaged + 1
            new.writestr(name, record)
    assert damaged == 1


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("at", [0, -1])
def test_a_changed_bit_in_a_file_is_found(part: str, at: int, tmp_path: Path) -> None:
    state = make()
    torch.save(state, tmp_path / "a.pt")
    tensor = getattr(state, part)
    changed_file(tmp_path / "a.pt", tmp_path / "b.pt", tensor, at % (tensor.numel() * tensor.element_size()))
    with pytest.raises(StateError, match=r"not what was saved.*damaged or half written"):
        torch.load(tmp_path / "b.pt", weights_only=True)


def test_a_changed_bit_in_a_file_of_the_old_format_is_found() -> None:
    """Its values come after the states: these are checked when they are used."""
    state, file = make(), io.BytesIO()
    torch.save(state, file, _use_new_zipfile_serialization=False)
    data = bytes(state.payload.view(-1).tolist())
    assert file.getvalue().count(data) == 1
    damaged = file.getvalue().replace(data, data[:-1] + bytes([data[-1] ^ 1]))
    for use in (
        lambda x: x.clone(),
        lambda x: x + 1,
        lambda x: x.add_(1),
        lambda x: x[:],
        lambda x: torch.zeros_like(make()).copy_(x),
        pickle.dumps,
        copy.copy,
        lambda x: x.__tensor_flatten__(),
        lambda x: x.check(),
    ):
        with pytest.raises(StateError, match="not what was saved"):
            use(torch.load(io.BytesIO(damaged), weights_only=True))


def test_checksums_depend_on_all_that_a_state_is() -> None:
    """Swapped words, zeroed blocks, shapes, formats; and not on pieces."""
    x = FP8State.of(torch.randn(64, 128), format="log")
    sums = {state_checks.checksum(x)}

    def changed(change: Callable[[FP8State], None]) -> None:
        y = x.clone()
        change(y)
        value = state_checks.checksum(y)
        assert value not in sums
        sums.add(value)

    def swap(words: Tensor, i: int, j: int) -> None:
        words[[i, j]] = words[[j, i]]

    for i, j in ((0, 1), (0, 128), (5, 1023)):
        changed(lambda y, i=i, j=j: swap(y.payload.view(-1).view(torch.int64), i, j))
    changed(lambda y: y.payload[32:].zero_())
    changed(lambda y: y.side[3:4].neg_())
    changed(lambda y: setattr(y, "payload", y.payload.view(128, 64)))
    changed(lambda y: setattr(y, "format", "e4m3"))
    changed(lambda y: setattr(y, "parameter", "split"))


def test_checksums_do_not_depend_on_pieces_or_places(monkeypatch: pytest.MonkeyPatch) -> None:
    state = make()
    whole = state_checks.checksum(state)
    shifted = state.like(lambda x: torch.cat([x.view(-1)[:1], x.view(-1)])[1:].view(x.shape))
    assert state_checks.checksum(shifted) == whole
    monkeypatch.setattr(state_checks, "PIECE", 64)
    assert state_checks.checksum(state) == whole
    assert state_checks.checksum(state.to("meta")) is None


def test_a_damaged_checkpoint_of_dcp_is_refused(tmp_path: Path) -> None:
    state = make()
    dcp.save({"s": state}, checkpoint_id=tmp_path, no_dist=True)
    (file,) = tmp_path.glob("*.distcp")
    data, content = bytes(state.payload.view(-1).tolist()), file.read_bytes()
    assert content.count(data) == 1
    file.write_bytes(content.replace(data, bytes(len(data))))
    target = {"s": make(zeros=True)}
    with pytest.raises(CheckpointException, match="not what was saved"):
        dcp.load(target, checkpoint_id=tmp_path, no_dist=True)
    assert_same(make(zeros=True), target["s"])
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointException, match=r"PytorchStreamReader|unexpected|failed"):
        dcp.load(target, checkpoint_id=tmp_path, no_dist=True)
    assert_same(make(zeros=True), target["s"])
