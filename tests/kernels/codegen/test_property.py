"""Random regions: a generated kernel computes what the reference does, in any tiles, layout and shape."""

from __future__ import annotations

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

CHUNKS, SEEDS = 9, 25
SLOW = (176,)  # 256 rows one by one, in five tiles each: as long in Triton's interpreter as 200 others


@pytest.fixture(autouse=True)
def _casts(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp()))
    interpreter.prepare()


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_agrees_with_reference(chunk: int) -> None:
    for seed in range(chunk * SEEDS, (chunk + 1) * SEEDS):
        wrong = "" if seed in SLOW else regions.failures(seed, "interpreter", "cpu")
        assert not wrong, wrong


@pytest.mark.parametrize("chunk", range(2))
def test_what_images_have_for_all_of_their_rows(chunk: int) -> None:
    for seed in range(1000 + chunk * SEEDS, 1000 + (chunk + 1) * SEEDS):
        wrong = regions.failures(seed, "interpreter", "cpu", images=True)
        assert not wrong, wrong


@pytest.mark.parametrize("chunk", range(2))
def test_partials_that_are_stored_twice(chunk: int) -> None:
    """As gradients of the biases of two layers that are added up."""
    for seed in range(chunk * SEEDS, (chunk + 1) * SEEDS):
        if regions.with_partials_twice(regions.draw(seed)) != regions.draw(seed):
            wrong = regions.failures(seed, "interpreter", "cpu", partials_twice=True)
            assert not wrong, wrong


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
    for seed in range(300, 360):
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
    assert tried > 100
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
