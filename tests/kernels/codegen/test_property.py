"""Random regions: a generated kernel computes what the reference does, in any tiles, layout and shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import interpreter
import pytest
import regions
import torch

from fp8compile.kernels.check import check_kernel
from fp8compile.kernels.codegen import generated

pytestmark = [
    pytest.mark.skipif(not interpreter.INTERPRETED, reason="tests/gpu/test_generated.py runs it compiled"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, of infinities and nan
]

# With the others they have every operator, store, kind of tile, and way to read a tensor that the first 225 have.
RARE = (54, 75, 88, 90, 92, 97, 108, 111, 126, 127, 137, 147, 151, 177, 178, 191, 192, 200, 203, 212)
CHUNKS = [range(25), range(25, 50), RARE]
IMAGES = (*range(1000, 1025), 1025, 1026, 1027, 1029, 1035, 1040, 1045)  # as the first 50


@pytest.fixture(autouse=True)
def _casts(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp()))
    interpreter.prepare()


@pytest.mark.parametrize("chunk", CHUNKS, ids=lambda chunk: f"from {chunk[0]}")
def test_agrees_with_reference(chunk: Sequence[int]) -> None:
    for seed in chunk:
        wrong = regions.failures(seed, "interpreter", "cpu")
        assert not wrong, wrong


def test_what_images_have_for_all_of_their_rows() -> None:
    for seed in IMAGES:
        wrong = regions.failures(seed, "interpreter", "cpu", images=True)
        assert not wrong, wrong


def test_partials_that_are_stored_twice() -> None:
    """As gradients of the biases of two layers that are added up."""
    for seed in range(50):
        if regions.with_partials_twice(regions.draw(seed)) != regions.draw(seed):
            wrong = regions.failures(seed, "interpreter", "cpu", partials_twice=True)
            assert not wrong, wrong


def test_columns_of_several_tensors_side_by_side() -> None:
    """As gradients of q, k and v that are read where attention has written them."""
    tried = 0
    for seed in range(25):
        found = regions.with_columns_side_by_side(regions.draw(seed))
        if any(part.widths for part in found.region.parts):
            tried += 1
            wrong = regions.failures(seed, "interpreter", "cpu", side_by_side=True)
            assert not wrong, wrong
    assert tried > 5


def test_draws_are_functions_of_their_seed() -> None:
    assert regions.draw(7) == regions.draw(7)
    assert len({regions.draw(seed).region for seed in range(50)}) == 50


def test_specs_survive_being_written() -> None:
    for seed in range(50):
        draw = regions.draw(seed)
        assert generated.parse(draw.region.to_json(), draw.schedule.to_json()) == (draw.region, draw.schedule)


def test_comparison_notices_one_wrong_element() -> None:
    """The bounds are no excuse: of kernels' results with one element changed to its next code but one, or by 2^-10,
    nearly all are found out. Those that are not depend on a cancellation, or are the lesser entries of a maximum."""
    noticed = tried = 0
    for seed in range(300, 330):
        draw = regions.draw(seed)
        sizes = draw.sizes[-1]
        inputs = check_kernel.random_inputs(draw.region, sizes, 4 * seed, "cpu")
        buffers = generated.launch(draw.region, draw.schedule, inputs, sizes, "interpreter")
        for part in draw.region.parts:
            for store in part.stores:
                if draw.region.buffers[store.buffer].dtype == "bool" or buffers[store.buffer].numel() == 0:
                    continue
                changed = [b.clone() for b in buffers]
                _change(changed[store.buffer], store.offset if isinstance(store.offset, int) else 0)
                tried += 1
                noticed += check_kernel.compare(draw.region, draw.schedule, inputs, sizes, changed) != []
    assert tried > 50
    assert noticed >= 0.9 * tried, (noticed, tried)


def _change(buffer: torch.Tensor, at: int) -> None:
    flat = buffer.view(-1)
    if buffer.dtype.itemsize == 1:
        flat.view(torch.uint8)[at] ^= 2
    else:
        flat[at] = flat[at] * (1 + 2.0**-6) + 2.0**-10


def test_comparison_notices_writes_outside() -> None:
    draw = next(d for d in map(regions.draw, range(100)) if len(d.region.buffers) == 1 and not d.region.sizes)
    inputs = check_kernel.random_inputs(draw.region, [], 0, "cpu")

    class Careless:
        """Writes one byte too many."""

        def __getitem__(self, grid: tuple[int, ...]) -> object:
            def launch(*args: torch.Tensor, num_warps: int) -> None:
                output = args[-1]
                end = output.view(torch.uint8).view(-1)
                torch.as_strided(end, (1,), (1,), end.storage_offset() + end.numel())[0] = 0

            return launch

    lines = check_kernel.check(Careless(), draw.region, replace(draw.schedule), inputs, [])
    assert "y0: written outside of it" in lines
