"""The smallest model that still fails: steps, outputs, options and sizes are taken away while it does.

A spec stays valid whatever is taken away (`spec.py`), so this is greedy: of all models that are a little simpler than
the failing one, the first that fails in the same manner takes its place, until none does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from .judge import Settings, Verdict
from .source import source
from .spec import Output, Spec, Step
from .writer import KINDS

SIZES = (1, 2, 8, 16, 17, 32, 64)
DEFAULTS: dict[str, Any] = {"recipe": "mixed", "save_min_bytes": 0, "lm_head": True}
Fails = Callable[[Spec], Verdict]


def manner(verdict: Verdict) -> set[str]:
    """How a model fails: by which exception, in a kernel, in numbers that are not finite, or too far off; and where."""
    return {_manner(reason) for reason in verdict.reasons} if verdict.is_failure else set()


def _manner(reason: str) -> str:
    if reason.startswith("kernel"):
        return "kernel"
    way, _, text = reason.partition(": ")
    error = re.match(r"\w+(Error|Exception|Warning)\b", text)
    if error:
        return f"{way} {error[0]}"
    return f"{way} {'not finite' if 'not finite' in text else 'apart' if 'inductor' in text else 'off'}"


def shrink(spec: Spec, judge: Fails, most: int = 150) -> tuple[Spec, Verdict]:
    """The simplest spec found that fails as `spec` does, and its verdict. most: models that are tried."""
    verdict = judge(spec)
    wanted, tried = manner(verdict), 0
    progress = True
    while progress:
        progress = False
        for simpler in simpler_ones(spec):
            if tried >= most:
                return spec, verdict
            tried += 1
            found = judge(simpler)
            if manner(found) & wanted:
                spec, verdict, progress = simpler, found, True
                break
    return spec, verdict


def simpler_ones(spec: Spec) -> Iterator[Spec]:
    """Specs with something less than `spec`, what takes most away first."""
    yield from _fewer_outputs(spec)
    for i in reversed(range(len(spec.steps))):
        yield _without_step(spec, i)
    yield from _plainer_options(spec)
    yield from _plainer_model(spec)
    for i, step in enumerate(spec.steps):
        yield from (replace(spec, steps=(*spec.steps[:i], s, *spec.steps[i + 1 :])) for s in _plainer_steps(step))
    yield from _smaller(spec)


def _fewer_outputs(spec: Spec) -> Iterator[Spec]:
    if len(spec.outputs) > 1:
        for i in range(len(spec.outputs)):
            yield replace(spec, outputs=(*spec.outputs[:i], *spec.outputs[i + 1 :]))
    for i, output in enumerate(spec.outputs):
        for plainer in (Output(output.value), replace(output, view="plain"), replace(output, upcast=True)):
            if plainer != output:
                yield replace(spec, outputs=(*spec.outputs[:i], plainer, *spec.outputs[i + 1 :]))


def _without_step(spec: Spec, at: int) -> Spec:
    """Whoever read what step `at` made reads what it read."""
    instead = spec.steps[at].inputs[0]

    def moved(value: int) -> int:
        return instead if value == at + 1 else value - (value > at + 1)

    left = [replace(s, inputs=tuple(map(moved, s.inputs))) for i, s in enumerate(spec.steps) if i != at]
    return replace(spec, steps=tuple(left), outputs=tuple(replace(o, value=moved(o.value)) for o in spec.outputs))


def _plainer_options(spec: Spec) -> Iterator[Spec]:
    for name, value in spec.options.items():
        if name == "select" or value == DEFAULTS.get(name):
            continue
        fewer = {key: v for key, v in spec.options.items() if key != name}
        yield replace(spec, options=fewer | ({name: DEFAULTS[name]} if name in DEFAULTS else {}))


def _plainer_model(spec: Spec) -> Iterator[Spec]:
    if spec.length and not any(KINDS[step.kind].sequence for step in spec.steps) and spec.start != "patches":
        yield replace(spec, length=0, batch=spec.rows, start="float")
    if spec.start != "float":
        yield replace(spec, start="float")
    for precision in ("bf16", "fp32"):
        if spec.precision == "autocast":
            yield replace(spec, precision=precision)
    if spec.input_grad:
        yield replace(spec, input_grad=False)
    if not spec.loss_inside:
        yield replace(spec, loss_inside=True)


def _plainer_steps(step: Step) -> Iterator[Step]:
    if step.checkpoint or step.frozen:
        yield replace(step, checkpoint=False, frozen=False)
    if step.kind in ("mlp", "mixture", "lora", "attention", "low_rank_weight", "conv1d", "conv2d"):
        yield Step("linear", step.inputs, {"out": step.params.get("out", 16), "bias": False})
    for name, value in step.params.items():
        if value is True:
            yield replace(step, params={**step.params, name: False})


def _smaller(spec: Spec) -> Iterator[Spec]:
    for name in ("batch", "length", "width"):
        for size in _below(getattr(spec, name)):
            yield replace(spec, **{name: size})
    for i, step in enumerate(spec.steps):
        for name, value in step.params.items():
            if name in ("out", "hidden", "dim", "heads", "experts", "rank"):
                for size in _below(value):
                    params = {**step.params, name: size} | ({"shared": 1} if name == "heads" else {})
                    yield replace(spec, steps=(*spec.steps[:i], replace(step, params=params), *spec.steps[i + 1 :]))


def _below(size: int) -> list[int]:
    return sorted({n for n in (*SIZES, size // 2) if 0 < n < size})


SCRIPT = '''

# ---- the check: eager PyTorch against the backend. All checks of the fuzzer: python -m tests.fuzz --script THIS FILE

SETTINGS = {settings!r}
SPEC = r"""{spec}"""


def step(model, run, device):
    """Outputs and gradients."""
    given = {{n: x.to(device) for n, x in inputs().items()}}
    if PRECISION == "bf16":
        given = {{n: x.bfloat16() if x.is_floating_point() else x for n, x in given.items()}}
    given["x"].requires_grad_(INPUT_GRAD and given["x"].is_floating_point())
    names = Model.forward.__code__.co_varnames[1 : Model.forward.__code__.co_argcount]
    with torch.autocast(device, torch.bfloat16, enabled=PRECISION == "autocast"):
        outputs = run(**{{n: given[n] for n in names}})
        total = outputs[0] if LOSS_INSIDE else loss(outputs, **{{n: x for n, x in given.items() if n not in names}})
    if total.requires_grad:
        total.backward()
    found = {{f"output {{n}}": o.detach() for n, o in enumerate(outputs)}} | {{"input": given["x"].grad}}
    found |= {{n: p.grad for n, p in model.named_parameters()}}
    return {{n: x for n, x in found.items() if x is not None}}


def main(device):
    import copy

    torch.manual_seed({seed})
    model = Model()
    for p in model.parameters():
        if p.dim() == 1:
            p.data.add_(0.1 * torch.randn(p.shape))
    model = model.to(device, torch.bfloat16 if PRECISION == "bf16" else torch.float32)
    ours = copy.deepcopy(model)
    expected = step(model, model, device)
    if device == "cuda":  # memory that nobody has written holds nan
        held = [torch.full((2**n,), 255, dtype=torch.uint8, device=device) for n in range(9, 26) for _ in range(8)]
        del held
    run = torch.compile(ours, backend="fp8", options={{"strict": True, **OPTIONS, **{way!r}}})
    for name, x in step(ours, run, device).items():
        want, x = expected[name].double(), x.double()
        ratio = (want.square().sum() / (x - want).square().sum()).log10() * 10
        print(f"{{name}}: {{ratio.item():.1f}} dB, {{int((~x.isfinite()).sum())}} of {{x.numel()}} not finite")


if __name__ == "__main__":
    main({device!r})
'''


def script(spec: Spec, verdict: Verdict, settings: Settings, way: dict[str, str]) -> str:
    """A file that shows the failure, to be read and run by itself."""
    title = "\n".join([f"The smallest model found that fails as seed {spec.seed} does.", "", *verdict.reasons[:8]])
    text = SCRIPT.format(
        settings=dict(vars(settings)), spec=spec.to_json(), seed=spec.seed, way=way, device=settings.device
    )
    return source(spec, title.replace("\\", "/").replace('"""', "'''")) + text
