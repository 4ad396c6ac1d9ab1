"""Steps without parameters: functions, combinations, views, in-place writes, gathers and scatters, batched matmuls."""

from __future__ import annotations

from .spec import Params
from .writer import Value, Writer, fitted, kind

ACTIVATIONS = (
    "F.gelu({})", "F.silu({})", "F.relu({})", "torch.tanh({})", "torch.sigmoid({})", "F.leaky_relu({}, 0.5)",
    "{}.softmax(-1) * 4", "0.3 * {}.square()", "{0} / (1 + {0}.abs())", "torch.exp(-{}.square())", "torch.sin({})",
    "F.elu({})", "F.mish({})", "F.softplus({})", "{}.clamp(-1.5, 1.0)", "F.relu({}).square()", "F.hardswish({})",
)  # fmt: skip
UNARY = (
    "{}.roll(1, 0)", "{}.flip(-1) * 0.5", "{}.flip(0)", "{0}.mean(-1, keepdim=True) + {0}",
    "{0}.mean(0, keepdim=True) + {0}", "{0}[:1].expand_as({0}) + {0}", "{0} - {0}.amax(-1, keepdim=True)",
    "{0} * {0}.detach().sigmoid()", "F.dropout({}, 0.0)", "F.normalize({}.float(), dim=-1).to({0}.dtype)",
    "{}.float().cumsum(-1).to({0}.dtype) * 0.3", "{0} + {0}.float().logsumexp(-1, keepdim=True).to({0}.dtype)",
    "torch.where({0} > 0, {0}, 0.1 * {0})", "{0}.masked_fill({0} < -1, 0.0)", "{0}.reshape(-1).reshape({0}.shape)",
    "{0}.flatten().view({0}.shape).contiguous() * 0.7", "torch.stack([{0}, -0.5 * {0}], 0).sum(0)",
    "torch.stack([{0}, 0.5 * {0}], -1).amax(-1)", "({0} @ {0}.transpose(-1, -2)).tanh() @ {0} * 0.1",
    "{0} / ({0}.float().std(-1, keepdim=True, correction=0) + 1).to({0}.dtype)",
    "{0}.transpose(-1, -2).contiguous().transpose(-1, -2) * 0.9",
)  # fmt: skip
ON_SEQUENCES = (
    "{0}[:, :1].expand_as({0}) + {0}", "{0}.mean(1, keepdim=True) + {0}", "{}.cumsum(1) * 0.3", "{}.roll(1, 1)",
    "{0}.transpose(0, 1).contiguous().transpose(0, 1)", "{0}.transpose(1, 2).softmax(-1).transpose(1, 2) * 3",
    "torch.einsum('bic,bjc->bij', {0}, {0}).softmax(-1) @ {0}",
    "torch.baddbmm({0}, ({0} @ {0}.transpose(1, 2)).softmax(-1), {0}, beta=0.5, alpha=0.5)",
    "torch.bmm({0}.transpose(1, 2), {0}).softmax(-1).bmm({0}.transpose(1, 2)).transpose(1, 2)",
    "torch.cat([{0}[:, 1:], {0}[:, :1]], 1)", "{0}.amax(1, keepdim=True) * 0.5 + {0}",
)  # fmt: skip
IN_PLACE = (
    "{t}.add_(0.1).mul_(0.7)", "{t}.relu_()", "{t}.masked_fill_({t} < -1, -1.0)", "{t}[..., 0] = 0.0",
    "{t}[..., :1] = {x}[..., -1:]", "{t}[0] = {x}[-1] * 0.5", "{t}[..., ::2] *= 0.5", "{t}.mul_({x})",
    "{t}[..., 0].fill_(1.0)", "{t} += {x}.sigmoid()", "{t}.view(-1)[:1].zero_()",
)  # fmt: skip
READS = (
    "{b}.clone()", "{b}.tanh()", "{b} * 0.7", "{b}.flip(0)", "torch.cat([{b}, {b}], -1)[..., :{width}]",
    "{b}.transpose(-1, -2).contiguous().transpose(-1, -2)",
)  # fmt: skip
WRITES = (
    "", "{b}.copy_({y}.detach())", "{b}.add_(0.5)", "{b}.mul_(0.9).add_({y}.detach() * 0.1)",
    "{b}[0] = {y}.detach()[0]",
)  # fmt: skip


@kind(lambda r, s: {"which": r.randrange(len(ACTIVATIONS))}, weight=4)
def activation(w: Writer, p: Params, x: list[Value]) -> tuple[str, int]:
    return ACTIVATIONS[p["which"]].format(x[0].name), x[0].width


@kind(lambda r, s: {"which": r.randrange(len(UNARY))}, weight=4)
def unary(w: Writer, p: Params, x: list[Value]) -> tuple[str, int]:
    return UNARY[p["which"]].replace("{}", "{0}").format(x[0].name), x[0].width


@kind(lambda r, s: {"which": r.randrange(len(ON_SEQUENCES))}, sequence=True, weight=2)
def on_sequence(w: Writer, p: Params, x: list[Value]) -> tuple[str, int]:
    return ON_SEQUENCES[p["which"]].replace("{}", "{0}").format(x[0].name), x[0].width


@kind(lambda r, s: {"read": r.randrange(len(READS)), "written": r.randrange(len(WRITES))}, weight=1.5)
def remembered(w: Writer, p: Params, x: list[Value]) -> tuple[str, int]:
    """A buffer of the model that is read, and then written, unless the step may run twice."""
    buffer = w.module(f"nn.Buffer(torch.randn({', '.join(map(str, (*w.spec.lead, x[0].width)))}))")
    read, y = f"r{w.number}", f"y{w.number}"
    w.line(f"{read} = ({READS[p['read']].format(b=buffer, width=x[0].width)}).to({x[0].name}.dtype)")
    w.line(f"{y} = {x[0].name} * {read} + {read}")
    written = WRITES[p["written"]].format(b=buffer, y=y)
    if written and not w.runs_twice:
        w.line(written)
    return y, x[0].width


@kind(lambda r, s: {"which": r.randrange(len(IN_PLACE))}, weight=2)
def in_place(w: Writer, p: Params, x: list[Value]) -> tuple[str, int]:
    name = f"t{w.number}"
    w.line(f"{name} = {x[0].name}.clone(memory_format=torch.contiguous_format)")
    w.line(IN_PLACE[p["which"]].format(t=name, x=x[0].name))
    return name, x[0].width


@kind(arity=2, weight=4)
def residual(w: Writer, p: Params, x: list[Value]) -> tuple[str, int]:
    """The sum of two tensors; a thin one is spread over the other."""
    wide, thin = sorted(x, key=lambda v: -v.width)
    return f"{wide.name} + {thin.name if thin.width == 1 else fitted(thin, wide.width)}", wide.width


@kind(lambda r, s: {"how": r.choice(("F.silu", "torch.sigmoid", "torch.tanh", ""))}, arity=2, weight=3)
def product(w: Writer, p: Params, x: list[Value]) -> tuple[str, int]:
    wide, thin = sorted(x, key=lambda v: -v.width)
    factor = thin.name if thin.width == 1 else fitted(thin, wide.width)
    return f"{p['how']}({factor}) * {wide.name}", wide.width


@kind(arity=2, weight=2)
def concatenate(w: Writer, p: Params, x: list[Value]) -> tuple[str, int]:
    return f"torch.cat([{x[0].name}, {x[1].name}], -1)", x[0].width + x[1].width


@kind(arity=2)
def choose(w: Writer, p: Params, x: list[Value]) -> tuple[str, int]:
    return f"torch.where({x[0].name}[..., :1] > 0, {x[0].name}, {fitted(x[1], x[0].width)})", x[0].width


@kind(lambda r, s: {"how": r.choice(("first", "last", "odd", "swap", "split"))}, weight=2)
def part(w: Writer, p: Params, x: list[Value]) -> tuple[str, int]:
    """Some of the features, or all in another order."""
    name, n, half = x[0].name, x[0].width, -(-x[0].width // 2)
    if p["how"] == "swap":
        return f"torch.cat({name}.chunk(2, -1)[::-1], -1)", n
    if p["how"] == "split":
        return f"sum(F.pad(c, (0, {half} - c.shape[-1])) for c in {name}.split({half}, -1))", half
    return f"{name}[..., {({'first': f':{half}', 'last': f'{n - half}:', 'odd': '::2'})[p['how']]}]", half


@kind(lambda r, s: {"how": r.choice(("select", "gather", "scatter", "index_add", "take")), "axis": r.choice((0, -1))})
def indexed(w: Writer, p: Params, x: list[Value]) -> tuple[str, int]:
    """Rows or features by indices, which are an input."""
    name, axis = x[0].name, p["axis"]
    size = w.spec.batch if axis == 0 else x[0].width
    index = w.given(f"index{w.number}", f"torch.randint({size}, ({size},), generator=g)")
    shaped = index if axis == -1 else f"{index}.view(-1, {', '.join('1' for _ in w.spec.lead)})"
    return {
        "select": f"{name}.index_select({axis}, {index})",
        "take": f"{name}[{index}]" if axis == 0 else f"{name}[..., {index}]",
        "gather": f"{name}.gather({axis}, {shaped}.expand_as({name}))",
        "scatter": f"torch.zeros_like({name}).scatter_add({axis}, {shaped}.expand_as({name}), {name})",
        "index_add": f"torch.zeros_like({name}).index_add({axis}, {index}, {name})",
    }[p["how"]], x[0].width
