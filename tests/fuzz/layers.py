"""Steps with parameters: linear layers, gates, feed-forwards, norms, convolutions, shared and tied weights."""

from __future__ import annotations

import math
import random

from .spec import Params, Spec
from .writer import Value, Writer, fitted, kind

WIDTHS = (1, 2, 8, 16, 17, 24, 32, 48, 64, 100, 128, 129, 136, 200, 256, 300)
GATES = (1, 2, 8, 17)


def any_width(r: random.Random, spec: Spec) -> int:
    """A number of features: often small, seldom more than one tile of any schedule has."""
    return r.choice((1000, 1100, 2000)) if r.random() < 0.01 and spec.rows < 40 else r.choice(WIDTHS)


def _draw_linear(r: random.Random, spec: Spec) -> Params:
    return {"out": any_width(r, spec), "bias": r.random() < 0.6}


@kind(_draw_linear, weight=5)
def linear(w: Writer, p: Params, x: list[Value]) -> tuple[str, int]:
    return f"{w.linear(x[0].width, p['out'], p['bias'])}({x[0].name})", p["out"]


@kind(lambda r, s: {"out": r.choice(GATES), "how": r.choice(("sigmoid", "softmax", "top"))}, weight=2)
def gate(w: Writer, p: Params, x: list[Value]) -> tuple[str, int]:
    """A gate or a router: few outputs, whose probabilities scale the tensor."""
    layer, n = w.linear(x[0].width, p["out"], bias=p["out"] % 2 == 0), p["out"]
    scores = f"g{w.number}"
    if p["how"] == "sigmoid":
        w.line(f"{scores} = torch.sigmoid({layer}({x[0].name}))")
    else:
        w.line(f"{scores} = F.softmax({layer}({x[0].name}), dim=-1, dtype=torch.float32).to({x[0].name}.dtype)")
    if n > 1:
        chosen = f"{scores}.topk({min(2, n)}, -1).values.sum(-1, keepdim=True)" if p["how"] == "top" else ""
        w.line(f"{scores} = {chosen or f'{scores}[..., {n - 1}:]'}")
    return f"{scores} * {x[0].name}", x[0].width


@kind(lambda r, s: {"experts": r.choice((2, 3)), "out": any_width(r, s)}, weight=0.7)
def mixture(w: Writer, p: Params, x: list[Value]) -> tuple[str, int]:
    """Every expert sees every row; a router weighs them. A shared one has a gate of one output."""
    n, k = p["out"], x[0].width
    router, shared, own = w.linear(k, p["experts"], False, "router"), w.linear(k, n, False, "shared"), f"r{w.number}"
    only = w.linear(k, 1, False, "only")
    w.line(f"{own} = F.softmax({router}({x[0].name}), -1)")
    parts = [f"{own}[..., {e}:{e + 1}] * {w.linear(k, n, False, f'e{e}')}({x[0].name})" for e in range(p["experts"])]
    parts.append(f"torch.sigmoid({only}({x[0].name})) * {shared}({x[0].name})")
    return " + ".join(parts), n


def _draw_mlp(r: random.Random, spec: Spec) -> Params:
    return {
        "hidden": any_width(r, spec),
        "out": any_width(r, spec),
        "how": r.choice(("swiglu", "geglu", "relu2", "gelu", "tanh")),
        "merged": r.random() < 0.5,
        "bias": r.random() < 0.4,
    }


@kind(_draw_mlp, weight=3)
def mlp(w: Writer, p: Params, x: list[Value]) -> tuple[str, int]:
    h, k, name = p["hidden"], x[0].width, x[0].name
    down = w.linear(h, p["out"], p["bias"], "down")
    if p["how"] not in ("swiglu", "geglu"):
        up = w.linear(k, h, p["bias"], "up")
        inner = {"relu2": "F.relu({}).square()", "gelu": "F.gelu({}, approximate='tanh')", "tanh": "torch.tanh({})"}
        return f"{down}({inner[p['how']].format(f'{up}({name})')})", p["out"]
    act = {"swiglu": "F.silu", "geglu": "F.gelu"}[p["how"]]
    a, b = f"a{w.number}", f"b{w.number}"
    if p["merged"]:
        w.line(f"{a}, {b} = {w.linear(k, 2 * h, p['bias'], 'up')}({name}).chunk(2, -1)")
    else:
        gated, up = w.linear(k, h, p["bias"], "gate"), w.linear(k, h, p["bias"], "up")
        w.line(f"{a}, {b} = {gated}({name}), {up}({name})")
    return f"{down}({act}({a}) * {b})", p["out"]


PARTS = {  # how part `i` of a packed projection [..., count·width] is read
    "index": ".unflatten(-1, ({count}, {width})).movedim(-2, 0)[{i}]",
    "last": ".unflatten(-1, ({width}, {count}))[..., {i}]",
    "slice": "[..., {start}:{end}]",
    "narrow": ".narrow(-1, {start}, {width})",
    "stride": "[..., {i}::{count}]",
}


def _draw_packed(r: random.Random, spec: Spec) -> Params:
    return {
        "out": any_width(r, spec),
        "count": r.choice((2, 3, 4)),
        "how": r.choice(list(PARTS)),
        "bias": r.random() < 0.5,
        "unread": r.random() < 0.15,
        "whole": r.random() < 0.2,
    }


@kind(_draw_packed, weight=2)
def packed(w: Writer, p: Params, x: list[Value]) -> tuple[str, int]:
    """One projection whose parts are read one by one; of some the last is not read, of others the whole as well."""
    n, count, y = p["out"], p["count"], f"y{w.number}"
    w.line(f"{y} = {w.linear(x[0].width, n * count, p['bias'])}({x[0].name})")
    how = PARTS[p["how"]]
    parts = [y + how.format(i=i, count=count, width=n, start=i * n, end=i * n + n) for i in range(count)]
    first, *others = parts[:-1] if p["unread"] else parts
    mixed = " + ".join([f"torch.tanh({first})", *others[:-1]]) + "".join(f" * torch.sigmoid({x})" for x in others[-1:])
    return (f"({mixed}) * {y}.square().mean(-1, keepdim=True)" if p["whole"] else mixed), n


def _draw_norm(r: random.Random, spec: Spec) -> Params:
    hows = ("layer", "layer", "plain", "rms", "own", "own", "group", "batch")
    return {"how": r.choice(hows), "groups": r.choice((1, 2, 4, 8))}


@kind(_draw_norm, weight=3)
def norm(w: Writer, p: Params, x: list[Value]) -> tuple[str, int]:
    n, name, channels = x[0].width, x[0].name, w.spec.length > 0
    how = p["how"]
    if how == "batch" and w.spec.rows == 1:
        how = "layer"  # torch refuses statistics of a single row
    if how in ("group", "batch"):
        made = f"nn.GroupNorm({math.gcd(p['groups'], n)}, {n})" if how == "group" else f"nn.BatchNorm1d({n})"
        layer = w.module(made)
        return (f"{layer}({name}.transpose(1, 2)).transpose(1, 2)" if channels else f"{layer}({name})"), n
    if how == "own":
        weight = w.module(f"nn.Parameter(torch.ones({n}))")
        wide = f"w{w.number}"
        w.line(f"{wide} = {name}.float()")
        normed = f"({wide} * torch.rsqrt({wide}.square().mean(-1, keepdim=True) + 1e-5)).to({name}.dtype)"
        return f"{normed} * {weight}.to({name}.dtype)", n
    made = {"layer": f"nn.LayerNorm({n})", "plain": f"nn.LayerNorm({n}, elementwise_affine=False)"}
    return f"{w.module(made.get(how, f'nn.RMSNorm({n}, eps=1e-5)'))}({name})", n


@kind(lambda r, s: {"out": any_width(r, s), "size": r.choice((1, 3, 5)), "depthwise": r.random() < 0.4}, sequence=True)
def conv1d(w: Writer, p: Params, x: list[Value]) -> tuple[str, int]:
    k, size = x[0].width, p["size"]
    n = k if p["depthwise"] else p["out"]
    layer = w.module(f"nn.Conv1d({k}, {n}, {size}, padding={size // 2}, groups={k if p['depthwise'] else 1})")
    return f"{layer}({x[0].name}.transpose(1, 2)).transpose(1, 2)", n


@kind(lambda r, s: {"out": any_width(r, s), "size": r.choice((1, 3))}, sequence=True, weight=0.7)
def conv2d(w: Writer, p: Params, x: list[Value]) -> tuple[str, int]:
    """The tokens as an image: as square as their number allows."""
    k, n, length = x[0].width, p["out"], w.spec.length
    height = max(h for h in range(1, math.isqrt(length) + 1) if length % h == 0)
    layer = w.module(f"nn.Conv2d({k}, {n}, {p['size']}, padding={p['size'] // 2})")
    image = f"{x[0].name}.transpose(1, 2).unflatten(2, ({height}, {length // height}))"
    return f"{layer}({image}).flatten(2).transpose(1, 2)", n


@kind(lambda r, s: {"bias": r.random() < 0.5}, sequence=True)
def tokens(w: Writer, p: Params, x: list[Value]) -> tuple[str, int]:
    """A linear layer along the tokens, as in MLP-Mixer."""
    layer = w.linear(w.spec.length, w.spec.length, p["bias"])
    return f"{layer}({x[0].name}.transpose(1, 2)).transpose(1, 2)", x[0].width


@kind(lambda r, s: {"which": r.randrange(8)}, weight=1.5)
def again(w: Writer, p: Params, x: list[Value]) -> tuple[str, int]:
    """A layer that an earlier step has used."""
    if not w.reused:
        return f"torch.tanh({x[0].name})", x[0].width
    layer, k, n = w.reused[p["which"] % len(w.reused)]
    return f"{layer}({fitted(x[0], k)})", n


@kind(lambda r, s: {"which": r.randrange(8)})
def tied(w: Writer, p: Params, x: list[Value]) -> tuple[str, int]:
    """The transposed weight of an earlier layer."""
    if not w.reused:
        return f"F.silu({x[0].name})", x[0].width
    layer, k, n = w.reused[p["which"] % len(w.reused)]
    return f"{fitted(x[0], n)} @ {layer}.weight.to({x[0].name}.dtype)", k


@kind(lambda r, s: {"out": any_width(r, s), "rank": r.choice((1, 2, 8))}, weight=0.7)
def lora(w: Writer, p: Params, x: list[Value]) -> tuple[str, int]:
    """A frozen layer beside two thin trained ones."""
    k, n = x[0].width, p["out"]
    base = w.module(f"nn.Linear({k}, {n}, bias=False).requires_grad_(False)", "base")
    a, b = w.linear(k, p["rank"], False, "a"), w.linear(p["rank"], n, False, "b")
    return f"{base}({x[0].name}) + 0.5 * {b}({a}({x[0].name}))", n


@kind(lambda r, s: {"out": any_width(r, s)}, weight=0.7)
def low_rank_weight(w: Writer, p: Params, x: list[Value]) -> tuple[str, int]:
    """A weight that is computed of others."""
    k, n = x[0].width, p["out"]
    whole, a, b = w.parameter(n, k, part="w"), w.parameter(4, k, part="a"), w.parameter(n, 4, part="b")
    return f"F.linear({x[0].name}, ({whole} + {b} @ {a}).to({x[0].name}.dtype))", n


@kind(lambda r, s: {"of_row": r.random() < 0.5})
def scaled(w: Writer, p: Params, x: list[Value]) -> tuple[str, int]:
    """Scaled and shifted by parameters, of one element or of a row."""
    n = x[0].width if p["of_row"] else 1
    name = x[0].name
    a, b = w.parameter(n, part="a", scale=0.7), w.parameter(n, part="b")
    return f"{name} * {a}.to({name}.dtype) + {b}.to({name}.dtype)", x[0].width


@kind(sequence=True)
def positions(w: Writer, p: Params, x: list[Value]) -> tuple[str, int]:
    layer = w.module(f"nn.Embedding({w.spec.length}, {x[0].width})")
    return f"{x[0].name} + {layer}(torch.arange({w.spec.length}, device={x[0].name}.device))", x[0].width
