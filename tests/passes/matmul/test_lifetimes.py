"""Lifetimes: matmuls that would wait for one another in memory stay separate, and neighbours are merged."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8compile

WIDTH, HEADS, RANK = 256, 2, 16
Merged = set[tuple[str, ...]]


def linears(*names: str) -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH, bias=False) for name in names})


def merged(model: nn.Module, forward: Callable[[Tensor], Tensor], train: bool = True) -> dict[str, Merged]:
    """Return for each role which matmuls became one; with `train` gradients are those of eager."""
    torch.compiler.reset()
    options = {"select": "all", "executor": "eager", "strict": True, "recipe": "rowwise"}
    run = torch.compile(forward, backend="fp8", options=options)
    x = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_(train)
    if train:
        read = [x, *(p for p in model.parameters() if p.requires_grad)]
        wanted, got = (torch.autograd.grad(f(x).square().mean(), read) for f in (forward, run))
        for a, b in zip(got, wanted, strict=True):
            assert (a - b).norm() < 2**-2 * b.norm()
    else:
        with torch.no_grad():
            run(x)
    found: dict[str, Merged] = {"output": set(), "grad_input": set(), "grad_weight": set()}
    for matmul in fp8compile.last_compile().matmuls:
        if matmul.merged:
            found[matmul.role].add(tuple(path.split(".")[-1] for path in matmul.merged))
    return found


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads = [t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v)]
    return F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)


def everywhere(*groups: tuple[str, ...]) -> dict[str, Merged]:
    return {role: set(groups) for role in ("output", "grad_input", "grad_weight")}


def test_a_frozen_teacher_is_done_before_its_student_reads_the_batch():
    net = linears("teacher", "teacher_out", "student", "student_out")
    for name in ("teacher", "teacher_out"):
        net[name].requires_grad_(False)

    def forward(x):
        with torch.no_grad():
            wanted = net["teacher_out"](net["teacher"](x).relu())
        return net["student_out"](net["student"](x).relu()) - wanted

    assert merged(net, forward) == everywhere()


def test_keys_and_values_of_one_layer_are_merged_and_those_of_others_are_not():
    """Each layer of a decoder reads the encoder's output; backward is done with one layer before the next."""
    net = linears("query1", "key1", "value1", "query2", "key2", "value2")

    def forward(memory):
        x = torch.ones_like(memory)
        for layer in "12":
            keys, values = net["key" + layer](memory), net["value" + layer](memory)
            x = x + attention(net["query" + layer](x), keys, values)
        return x

    pairs = [("key1", "value1"), ("key2", "value2")]
    assert merged(net, forward) == everywhere(*pairs)
    assert merged(net, forward, train=False)["output"] == set(pairs)


def test_attention_and_an_mlp_beside_it_do_not_wait_for_each_other():
    net = linears("q", "k", "v", "out", "up", "down")

    def forward(x):
        attended = net["out"](attention(net["q"](x), net["k"](x), net["v"](x)))
        return x + attended + net["down"](F.gelu(net["up"](x)))

    assert merged(net, forward) == everywhere(("q", "k", "v"))


def test_what_is_computed_in_turn_but_alive_at_one_time_is_merged():
    """Each has its rotation, or its activation, before the next is computed."""
    net = linears("q", "k", "v", "gate", "up")

    def turned(t):
        return t * t.detach().cos() + torch.cat([-t[..., WIDTH // 2 :], t[..., : WIDTH // 2]], -1)

    def forward(x):
        q = turned(net["q"](x))
        k = turned(net["k"](x))
        y = attention(q, k, net["v"](x)).tanh()
        gate = F.silu(net["gate"](y))
        return gate * net["up"](y)

    assert merged(net, forward) == everywhere(("q", "k", "v"), ("gate", "up"))
    assert merged(net, forward, train=False)["output"] == {("q", "k", "v"), ("gate", "up")}


def test_matmuls_of_adapters_do_not_part_what_they_lie_between():
    net = linears("q", "k", "v").requires_grad_(False)
    for name in "qk":
        net["down_" + name] = nn.Linear(WIDTH, RANK, bias=False)
        net["up_" + name] = nn.Linear(RANK, WIDTH, bias=False)

    def forward(x):
        q = net["q"](x) + net["up_q"](net["down_q"](x))
        k = net["k"](x) + net["up_k"](net["down_k"](x))
        return attention(q, k, net["v"](x))

    found = merged(net, forward)
    for role in ("output", "grad_input"):
        assert any({"q", "k", "v"} <= set(names) for names in found[role]), role
