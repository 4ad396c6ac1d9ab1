"""Attention, as torch's own operator and by hand, with every kind of mask and bias."""

from __future__ import annotations

import random

from .spec import Params, Spec
from .writer import Value, Writer, kind

MASKS = ("none", "causal", "told", "bool", "float", "expanded", "expanded_keys", "bias", "relative")


def _draw(r: random.Random, spec: Spec) -> Params:
    heads = r.choice((1, 2, 3, 4))
    return {
        "heads": heads,
        "shared": r.choice([n for n in (1, 2, 3, 4) if heads % n == 0]),  # heads that share keys and values
        "dim": r.choice((1, 4, 8, 16, 17, 32, 64)),
        "out": r.choice((8, 17, 24, 32, 64, 100)),
        "mask": r.choice(MASKS),
        "by_hand": r.random() < 0.35,
        "merged": r.random() < 0.5,
        "bias": r.random() < 0.4,
        "rotary": r.random() < 0.25,
    }


@kind(_draw, sequence=True, weight=3)
def attention(w: Writer, p: Params, x: list[Value]) -> tuple[str, int]:
    n = w.number
    q, k, v = (f"{letter}{n}" for letter in "qkv")
    _project(w, p, x[0], (q, k, v))
    if p["rotary"] and p["dim"] % 2 == 0:
        _rotate(w, p, (q, k), x[0].name)
    mask = _mask(w, p, x[0].name)
    if p["by_hand"]:
        mixed = _by_hand(w, p, (q, k, v), mask)
    else:
        how = "is_causal=True" if p["mask"] == "told" else f"attn_mask={mask or None}"
        grouped = ", enable_gqa=True" if p["shared"] > 1 else ""
        mixed = f"F.scaled_dot_product_attention({q}, {k}, {v}, {how}{grouped})"
    out = w.linear(p["heads"] * p["dim"], p["out"], p["bias"], "out")
    return f"{out}({mixed}.transpose(1, 2).flatten(2))", p["out"]


def _project(w: Writer, p: Params, x: Value, names: tuple[str, str, str]) -> None:
    heads = (p["heads"], p["heads"] // p["shared"], p["heads"] // p["shared"])
    widths = [h * p["dim"] for h in heads]
    if p["merged"]:
        layer = w.linear(x.width, sum(widths), p["bias"], "qkv")
        w.line(f"{', '.join(names)} = {layer}({x.name}).split(({', '.join(map(str, widths))}), -1)")
    for letter, name, width, count in zip("qkv", names, widths, heads, strict=True):
        made = name if p["merged"] else f"{w.linear(x.width, width, p['bias'], letter)}({x.name})"
        w.line(f"{name} = {made}.unflatten(-1, ({count}, {p['dim']})).transpose(1, 2)")


def _rotate(w: Writer, p: Params, names: tuple[str, str], like: str) -> None:
    half, angle = p["dim"] // 2, f"angle{w.number}"
    w.line(f"{angle} = torch.arange({w.spec.length}, device={like}.device).float()[:, None]")
    w.line(f"{angle} = {angle} * 0.5 ** torch.arange({half}, device={like}.device).float()")
    w.line(f"{angle} = torch.cat([{angle}, {angle}], -1)")
    for name in names:
        turned = f"torch.cat([-{name}[..., {half}:], {name}[..., :{half}]], -1)"
        w.line(f"{name} = ({name} * {angle}.cos() + {turned} * {angle}.sin()).to({name}.dtype)")


def _mask(w: Writer, p: Params, like: str) -> str:
    """The name of the mask; "" for none."""
    n, length, batch, heads = w.number, w.spec.length, w.spec.batch, p["heads"]
    name, of_like = f"mask{n}", f"device={like}.device"
    lower = f"torch.ones({length}, {length}, dtype=torch.bool, {of_like}).tril()"
    if p["mask"] in ("none", "told") and not (p["by_hand"] and p["mask"] == "told"):
        return ""
    if p["mask"] in ("causal", "told"):
        w.line(f"{name} = {lower}")
    elif p["mask"] == "bool":
        given = w.given(f"keep{n}", f"torch.rand({batch}, 1, {length}, {length}, generator=g) < 0.7")
        w.line(f"{name} = {given} | torch.eye({length}, dtype=torch.bool, {of_like})")
    elif p["mask"] == "float":
        w.line(f"{name} = torch.zeros({length}, {length}, dtype={like}.dtype, {of_like})")
        w.line(f"{name} = {name}.masked_fill(~{lower}, torch.finfo({like}.dtype).min)[None, None]")
    elif p["mask"] in ("expanded", "expanded_keys"):  # which keys are padding: the same for all queries and heads
        keep = f"(torch.rand({batch}, {length}, generator=g) < 0.7) | (torch.arange({length}) == 0)"
        shape = "[:, None, None, :]" if p["mask"] == "expanded" else "[:, None, :, None]"
        size = f"{batch}, {heads}, {length}, {length}"
        given = w.given(f"keep{n}", keep)
        wide = f"torch.where({given}{shape}, 0.0, -3.0).to({like}.dtype)"
        w.line(f"{name} = {wide}.expand({size})")
    elif p["mask"] == "bias":
        w.line(f"{name} = {w.parameter(heads, length, length, part='bias')}.to({like}.dtype)[None]")
    else:  # relative positions, as in T5
        table = w.module(f"nn.Embedding({2 * length}, {heads})", "table")
        w.line(f"distance{n} = torch.arange({length}, {of_like})[:, None] - torch.arange({length}, {of_like})")
        w.line(f"{name} = {table}(distance{n} + {length}).permute(2, 0, 1).unsqueeze(0).to({like}.dtype)")
    return name


def _by_hand(w: Writer, p: Params, names: tuple[str, str, str], mask: str) -> str:
    q, k, v = names
    if p["shared"] > 1:
        for name in (k, v):
            w.line(f"{name} = {name}.repeat_interleave({p['shared']}, 1)")
    scores = f"scores{w.number}"
    w.line(f"{scores} = {q} @ {k}.transpose(-1, -2) * {p['dim'] ** -0.5:.6f}")
    if mask:
        is_bool = p["mask"] in ("causal", "told", "bool")
        w.line(f"{scores} = {scores}.masked_fill(~{mask}, -1e4)" if is_bool else f"{scores} = {scores} + {mask}")
    return f"(F.softmax({scores}, -1, dtype=torch.float32).to({v}.dtype) @ {v})"
