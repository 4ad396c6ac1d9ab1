"""Find the cross-entropy behind an output head: what in the graph `fp8::chunked_loss` can stand for.

    %logits = mm(%x, %Wᵀ)                                forward         chosen: the gather
    … views, rows dropped (`passes/dropped_rows.py`), casts, scaling, a tanh (`Curve`), a log-softmax
    %chosen = gather(%log_probabilities, 1, %labels)
    … any loss at all, made of %chosen
    … %g, one number a row, from the incoming gradient   backward        cotangent: %g
    … %dlogits, from %g, labels and log-probabilities
    mm(%dlogits, %W)  mm(%dlogitsᵀ, %x)  sum(%dlogits, [0])              gradients

It is recognised by shape and proven by execution. Everything that reads logits, or what is computed from them with
rows or classes, must be a view, a cast, pointwise, a reduction over classes, or one of the ends above; of other
values it may depend on labels and on %g alone. What is between the ends is then run in FP64 on a few random rows and
classes, and must give what autograd gives of the cross-entropy, both ways. So it does not matter how a version of torch
decomposes a log-softmax; and a gradient that a user's own function changes on its way is seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import fx

from fp8compile.kernels.chunked_loss import Curve
from fp8compile.passes import fusible
from fp8compile.passes.compilation import aten, base, is_tensor, same_sizes, value
from fp8compile.passes.dropped_rows import find_cut, undoes
from fp8compile.passes.fusible import CONVERSIONS, EQUALITIES, PERMUTES
from fp8compile.passes.origin import source_line
from fp8compile.passes.prove_loss import (
    REDUCTIONS,
    SAME_ELEMENTS,
    SCATTERS,
    execute,
    is_log_probability,
    sign_of_gradient,
)
from fp8compile.passes.roles import Site

ARITHMETIC = {
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar,
    aten.neg.default, aten.exp.default, aten.log.default, aten.tanh.default,
}  # fmt: skip
CHOICES = EQUALITIES | {aten.where.self, aten.bitwise_not.default, aten.logical_not.default}
FILLS = fusible.CONSTANTS | SCATTERS


@dataclass(frozen=True)
class Found:
    """A cross-entropy. sign: of %g, as the gradient of −Σ chosen · sign · g would have it.

    cotangent: None in a graph without backward half. gradients: of x, weight and bias, those that there are, each as
    the node that computes it. cut: the slice that drops rows before the softmax.
    """

    site: Site
    chosen: fx.Node
    curve: Curve
    cotangent: fx.Node | None = None
    sign: float = 1.0
    gradients: dict[str, fx.Node] = field(default_factory=dict)
    cut: fx.Node | None = None


class NotFoundError(Exception):
    """Why a head's logits cannot be given up."""


def find_loss(site: Site, backward: set[fx.Node]) -> Found:
    """The cross-entropy of `site`, an output matmul. Raises `NotFoundError`."""
    return _Search(site, backward).found()


class _Search:
    """One head: the nodes between its ends, in the order of the graph."""

    def __init__(self, site: Site, backward: set[fx.Node]):
        self.site, self.backward = site, backward
        self.cut = find_cut(site.node, backward)
        self.logits = self.cut or site.node
        *rows, classes = value(self.logits).shape
        self.shape = (math.prod(rows), classes)
        self.inside: set[fx.Node] = set()
        self.leaves: set[fx.Node] = set()
        self.chosen: list[fx.Node] = []
        self.sums: list[fx.Node] = []
        self._known: dict[fx.Node, bool] = {}

    def found(self) -> Found:
        self._check_operands()
        self._follow()
        if len(self.chosen) != 1:
            raise NotFoundError(f"{len(self.chosen)} gathers read its log-probabilities")
        chosen = self.chosen[0]
        if self._kind(chosen) != "row" or not _along_last(chosen) or value(chosen).dim() != 2:
            raise NotFoundError("it gathers something else than one class a row")
        gradients = self._gradients()
        ends = {self._before_zeros(base(self._gradient_of_logits(n))) for n in gradients.values()}
        if len(ends) > 1:
            raise NotFoundError("its matmuls of backward read different gradients")
        slope = next(iter(ends), None)
        for node in (chosen, *ends):
            self._include(node)
        curve = self._curve()
        number = self._cotangent(bool(ends))
        inside = [(n, self._kind(n)) for n in chosen.graph.nodes if n in self.inside]
        env = execute(inside, self.logits, self.leaves)
        if not is_log_probability(env, self.logits, chosen, curve):
            raise NotFoundError("what is gathered are not log-probabilities of its classes")
        if slope is None or number is None:
            return Found(self.site, chosen, curve, cut=self.cut)
        sign = sign_of_gradient(env, self.logits, chosen, curve, number, slope)
        if not sign:
            raise NotFoundError("the gradient of its logits is not that of a cross-entropy")
        return Found(self.site, chosen, curve, number, sign, gradients, self.cut)

    def _check_operands(self) -> None:
        """Rows and classes must be told apart; matmuls of backward must read what forward reads."""
        site, (rows, classes) = self.site, self.shape
        if value(site.node).dtype not in fusible.FLOATS:
            raise NotFoundError(f"its logits are {value(site.node).dtype}, and gradients of chunks FP32")
        if str(classes) in (str(rows), str(site.m)):
            raise NotFoundError("it has as many rows as classes")
        if site.bias is not None and value(site.bias).dim() != 1:
            raise NotFoundError("what is added to its product is no bias of classes")
        for grad in site.grads:
            plain = grad.left if grad.weight_on_left else grad.right
            operand = site.right if grad.role == "grad_input" else site.left
            turned = grad.weight_on_left == (grad.role == "grad_weight")
            if not _shows(plain, operand, transposed=turned):
                raise NotFoundError(f"%{grad.node.name} does not read what its matmul of forward reads")

    # ---- what reads the logits -----------------------------------------------------------------------------------

    def _follow(self) -> None:
        stack, seen = [self.logits], {self.logits}
        grads = {s.node for s in self.site.grads}
        while stack:
            node = stack.pop()
            for user in node.users:
                if user in seen or user in grads:
                    continue
                seen.add(user)
                if user.target is aten.gather.default and user not in self.backward:
                    self.chosen.append(user)
                elif user in self.backward and self._sums_rows(user):
                    self.sums.append(user)
                elif user.target in PERMUTES and all(u in grads for u in user.users):
                    continue
                elif self._may_be_inside(user) or self._adds_zeros(node, user):
                    stack.append(user)
                else:
                    raise NotFoundError(self._reader(node, user))

    def _sums_rows(self, node: fx.Node) -> bool:
        source = node.args[0] if node.target is aten.sum.dim_IntList else None
        if not isinstance(source, fx.Node) or str(value(source).shape[-1]) != str(self.shape[1]):
            return False
        return value(source).dim() == 2 and node.args[1] == [0]

    def _adds_zeros(self, node: fx.Node, user: fx.Node) -> bool:
        """Whether `user` puts dropped rows back into the gradient of logits, or shows that in another shape."""
        if self.cut is None or user not in self.backward:
            return False
        if undoes(user, self.cut):
            return user.args[1] is node
        return user.target in SAME_ELEMENTS and undoes(base(user), self.cut)

    def _before_zeros(self, node: fx.Node) -> fx.Node:
        return base(node.args[1]) if self.cut is not None and undoes(node, self.cut) else node  # type: ignore[arg-type]

    def _reader(self, node: fx.Node, user: fx.Node) -> str:
        what = "its logits are" if self._kind(node) == "logits" else "a sum or maximum over its classes is"
        if user.op == "output":
            return f"{what} returned"
        where = source_line(user)
        return f"{what} read by {user.target}" + (f" ({where})" if where else "")

    def _kind(self, node: fx.Node) -> str:
        """What a tensor has elements for: "logits" (rows and classes), "row", "number", or "" (something else)."""
        if not is_tensor(node):
            return ""
        shape = value(node).shape
        count, rows, classes = str(math.prod(shape)), *map(str, self.shape)
        if count == "1":
            return "number"
        if str(shape[-1]) == classes and count == str(math.prod(self.shape)):
            return "logits"
        return "row" if count == rows else ""

    def _may_be_inside(self, node: fx.Node) -> bool:
        if not self._kind(node):
            return False
        if node.target in REDUCTIONS:
            source = node.args[0]
            dims = [d % value(source).dim() for d in node.args[1]]  # type: ignore[arg-type, union-attr]
            return self._kind(source) == "logits" and dims == [value(source).dim() - 1]  # type: ignore[arg-type]
        if node.target in SAME_ELEMENTS:  # an expansion repeats rows over classes, not over other rows
            return self._kind(node) in ("logits", self._kind(node.all_input_nodes[0]))
        if self._kind(node) == "logits" and any(self._lies_across(i) for i in node.all_input_nodes):
            return False
        return node.target in CONVERSIONS or node.target in ARITHMETIC or node.target in CHOICES

    def _lies_across(self, node: fx.Node) -> bool:
        """Whether as many numbers as there are rows lie along the classes (of which there are then as many)."""
        return self._kind(node) == "row" and str(value(node).shape[-1]) != "1"

    # ---- what that is computed from ------------------------------------------------------------------------------

    def _include(self, node: fx.Node) -> bool:
        """Put `node` and what it is computed from inside, as far as the leaves; whether it is inside."""
        if node in self.inside or node is self.logits:
            return True
        if node in self.leaves:
            return False
        kind, floating = self._kind(node), is_tensor(node) and value(node).is_floating_point()
        fill = node.target in FILLS and kind in ("logits", "number") and _along_last(node)
        known = fill or node.target is aten.gather.default or self._may_be_inside(node)
        if kind == "logits" and not known:
            raise NotFoundError(f"its logits meet %{node.name} ({node.target})")
        if floating and kind != "logits":
            take = known and (fill or self._is_of_logits(node))
        else:
            take = known and (floating or node.target not in ARITHMETIC)
        if not take:
            self.leaves.add(node)
            return False
        self.inside.add(node)
        for source in node.all_input_nodes:
            if is_tensor(source):
                self._include(source)
        return True

    def _is_of_logits(self, node: fx.Node) -> bool:
        """Whether one number a row is a reduction over classes, or arithmetic with one."""
        if node not in self._known:
            sources = [i for i in node.all_input_nodes if is_tensor(i) and value(i).is_floating_point()]
            self._known[node] = node.target is aten.gather.default or (
                self._may_be_inside(node) and (node.target in REDUCTIONS or any(map(self._is_of_logits, sources)))
            )
        return self._known[node]

    def _cotangent(self, has_backward: bool) -> fx.Node | None:
        """The one leaf that comes from backward. Besides it there may be labels and masks."""
        floats = [n for n in self.leaves if value(n).is_floating_point()]
        strange = [n for n in floats if n not in self.backward] + [n for n in floats if self._kind(n) != "row"]
        if strange:
            raise NotFoundError(f"%{strange[0].name} takes part in it: class weights, a temperature that is a tensor?")
        if len(floats) != int(has_backward):
            raise NotFoundError(f"{len(floats)} gradients flow into its log-probabilities, not one")
        return floats[0] if floats else None

    # ---- its ends ------------------------------------------------------------------------------------------------

    def _gradients(self) -> dict[str, fx.Node]:
        found: dict[str, fx.Node] = {}
        for role, node in [(s.role, s.node) for s in self.site.grads] + [("grad_bias", n) for n in self.sums]:
            if role in found or (role == "grad_bias" and self.site.bias is None):
                raise NotFoundError(f"%{node.name} reads the gradient of its logits too")
            found[role] = node
        return found

    def _gradient_of_logits(self, node: fx.Node) -> fx.Node:
        return next(i for i in node.all_input_nodes if i in self.backward)

    def _curve(self) -> Curve:
        """What is made of the logits before the softmax, whose maximum is taken first."""
        maxima = [n for n in self.inside if n.target is aten.amax.default]
        if len(maxima) != 1:
            raise NotFoundError(f"{len(maxima)} maxima over its classes are taken")
        node, factor, outer = maxima[0].all_input_nodes[0], 1.0, None
        while node is not self.logits:
            tensors, numbers = node.all_input_nodes, [a for a in node.args if isinstance(a, (int, float))]
            if node.target is aten.tanh.default and outer is None:
                outer, factor = factor, 1.0
            elif node.target in (aten.mul.Tensor, aten.mul.Scalar) and len(tensors) == len(numbers) == 1:
                factor *= numbers[0]
            elif node.target in (aten.div.Tensor, aten.div.Scalar) and node.args[0] is tensors[0] and numbers:
                factor /= numbers[0]
            elif node.target not in SAME_ELEMENTS and node.target not in CONVERSIONS:
                raise NotFoundError(f"its logits pass through {node.target} before the softmax")
            node = tensors[0]
        return Curve(factor, outer)


def _along_last(node: fx.Node) -> bool:
    """Whether a gather or a scatter goes along the last dimension; true of what is neither."""
    if node.target is not aten.gather.default and node.target not in SCATTERS:
        return True
    return node.args[1] % value(node).dim() == value(node).dim() - 1  # type: ignore[operator]


def _shows(view: fx.Node | None, x: fx.Node | None, transposed: bool) -> bool:
    """Whether a matrix is `x`, or its transpose: the same elements of the same memory."""
    if view is None or x is None or base(view) is not base(x):
        return False
    a, b = value(view), value(x).t() if transposed else value(x)
    return same_sizes((*a.shape, *a.stride(), a.storage_offset()), (*b.shape, *b.stride(), b.storage_offset()))
