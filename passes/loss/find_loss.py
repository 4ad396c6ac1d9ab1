"""Find the loss behind an output head: what in the graph `fp8::chunked_loss` can stand for.

    %logits = mm(%x, %Wᵀ)                                forward
    … views, rows dropped (`passes/loss/dropped_rows.py`), casts, scaling, a tanh (`Curve`), a log-softmax
    %chosen = gather(%log_probabilities, 1, %labels)
    %loss = neg(%chosen)                                                 ends: what is read from outside
    … any loss at all, made of %loss
    … %g, one number a row, from the incoming gradient   backward        cotangents: %g
    … %dlogits, from %g, labels and log-probabilities
    mm(%dlogits, %W)  mm(%dlogitsᵀ, %x)  sum(%dlogits, [0])              gradients

It is recognised by shape and proven by execution. Whatever is computed of logits with rows or classes by views, casts,
pointwise arithmetic and reductions over classes is run in FP64 on a few random rows and classes. Values of rows that so
turn out to be sums of the operator's `TERMS` are what it can replace, and nothing else may be read: not the logits, nor
what else there is with rows and classes. In backward the same is done with the gradient of logits, which may depend on
labels and on numbers of rows alone. So it does not matter how a version of torch decomposes a log-softmax, nor how a
user writes a loss; and a gradient that a user's own function changes on its way is seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import fx

from fp8compile.errors import first_line
from fp8compile.kernels.loss.softmax_step import Curve
from fp8compile.passes.core import fusible
from fp8compile.passes.core.aten_views import Gather, Slice, Sum
from fp8compile.passes.core.compilation import aten, base, dependents, is_tensor, value
from fp8compile.passes.core.fusible import CONVERSIONS
from fp8compile.passes.core.matmul_node import MatmulNode
from fp8compile.passes.core.node_views import node_argument
from fp8compile.passes.core.origin import source_line
from fp8compile.passes.core.sizes import same_sizes
from fp8compile.passes.loss.dropped_rows import find_cut, undoes
from fp8compile.passes.loss.loss_equivalence import (
    REDUCTIONS,
    SAME_ELEMENTS,
    SCATTERS,
    Factors,
    Values,
    execute,
    factors_of_gradient,
    factors_of_terms,
)
from fp8compile.passes.loss.loss_parts import Closure, NotFoundError, Parts, is_float


@dataclass(frozen=True)
class Found:
    """A loss. labelled: a gather of one class a row, or a scatter to it.

    ends: values of rows, as factors of the operator's terms. cotangents: numbers of rows from backward; the gradient of
    logits is the sum of the terms' gradients, each times such numbers and their factors; none in a graph without
    backward half. gradients: of x, weight and bias, those that there are, each as the node that computes it. cut: the
    slice that drops rows before the softmax.
    """

    head: MatmulNode
    labelled: fx.Node
    curve: Curve
    ends: dict[fx.Node, Factors]
    cotangents: dict[fx.Node, Factors] = field(default_factory=dict)
    gradients: dict[str, fx.Node] = field(default_factory=dict)
    cut: fx.Node | None = None

    @property
    def every_term(self) -> bool:
        """True if other terms than log-probabilities of labels take part."""
        return any(any(factors[1:]) for factors in (*self.ends.values(), *self.cotangents.values()))


def find_loss(head: MatmulNode, backward: set[fx.Node]) -> Found:
    """Return the cross-entropy of `head`, an output matmul. Raises `NotFoundError`."""
    return _Search(head, backward).found()


class _Search:
    """One head: the nodes between its ends, in the order of the graph."""

    def __init__(self, head: MatmulNode, backward: set[fx.Node]):
        self.head, self.backward = head, backward
        self.cut = find_cut(head.node, backward)
        self.logits = self.cut or head.node
        self.depending = dependents(head.node.graph, [head.node])
        self.parts = Parts(self.logits, self.depending)
        self.formed: list[fx.Node] = []

    def found(self) -> Found:
        self._check_operands()
        self._form()
        labelled = self._labelled()
        curve = self._curve()
        gradients = self._gradients()
        slopes = {self._before_zeros(base(self._gradient_of_logits(n))) for n in gradients.values()}
        if len(slopes) > 1:
            raise NotFoundError("its matmuls of backward read different gradients")
        terms = self._terms(labelled, curve)
        ends = self._read(terms, set(gradients.values()))
        cotangents = self._cotangents(slopes.pop(), labelled, curve) if slopes else {}
        ends |= self._read(terms, set(gradients.values()), cotangents)
        return Found(self.head, labelled, curve, ends, cotangents, gradients, self.cut)

    def _check_operands(self) -> None:
        """Refuse rows that cannot be told from classes, and matmuls of backward that read what forward does not."""
        head, rows, classes = self.head, self.parts.rows, self.parts.classes
        if value(head.node).dtype not in fusible.FLOATS:
            raise NotFoundError(f"its logits are {value(head.node).dtype}, and gradients of chunks FP32")
        if str(rows) == "1":
            raise NotFoundError("it has one row")
        if str(classes) in (str(rows), str(head.m)):
            raise NotFoundError("it has as many rows as classes")
        if head.bias is not None and value(head.bias).dim() != 1:
            raise NotFoundError("what is added to its product is no bias of classes")
        for grad in head.grads:
            plain = grad.left if grad.weight_on_left else grad.right
            operand = head.right if grad.role == "grad_input" else head.left
            turned = grad.weight_on_left == (grad.role == "grad_weight")
            if not _shows(plain, operand, transposed=turned):
                raise NotFoundError(f"%{grad.node.name} does not read what its matmul of forward reads")

    # ---- what is made of the logits ------------------------------------------------------------------------------

    def _form(self) -> None:
        """Collect what forward makes of logits alone, and of labels: all that can be executed."""
        formed = {self.logits}
        for node in self.head.node.graph.nodes:
            if node in self.depending and node not in self.backward and self._is_formed(node, formed):
                formed.add(node)
                self.formed.append(node)

    def _is_formed(self, node: fx.Node, formed: set[fx.Node]) -> bool:
        if self.parts.is_fill(node):
            return True
        sources = [i for i in node.all_input_nodes if is_tensor(i)]
        if node.target is aten.gather.default:
            sources = sources[:1]
        return self.parts.can_run(node) and all(i in formed or self.parts.is_fill(i) for i in sources)

    def _labelled(self) -> fx.Node:
        """Return what reads one class a row, or marks it: it has the labels."""
        fills = [i for n in self.formed for i in n.all_input_nodes if i.target in SCATTERS and self.parts.is_fill(i)]
        found = [n for n in self.formed if n.target is aten.gather.default] + fills
        if not found:
            self._read({}, set())  # which says what reads them instead
            raise NotFoundError("nothing reads one class a row of what is computed of its logits alone")
        if Gather(found[0]).index in self.depending:
            raise NotFoundError("its labels depend on its logits")
        return found[0]

    def _terms(self, labelled: fx.Node, curve: Curve) -> dict[fx.Node, Factors]:
        """Return the values of rows, with their factors if they are sums of terms."""
        rows = [n for n in self.formed if self.parts.kind(n) == "row" and is_float(n)]
        trials = self._trials(Closure(self.parts, [labelled, *rows]))
        index = Gather(labelled).index
        return {n: factors_of_terms(trials, n, self.logits, index, curve) for n in rows}

    def _trials(self, closure: Closure, only: fx.Node | None = None) -> list[Values]:
        try:
            return execute(closure.inside, self.logits, closure.leaves, only)
        except Exception as error:
            raise NotFoundError(f"what is made of its logits cannot be tried: {first_line(error)}") from error

    def _read(
        self, known: dict[fx.Node, Factors], gradients: set[fx.Node], cotangents: Iterable[fx.Node] = ()
    ) -> dict[fx.Node, Factors]:
        """Return those of `known` that are read from outside, or by what comes back. Raises where something else is,
        with rows and classes."""
        ends: dict[fx.Node, Factors] = {}
        sinks = [*(n for n in self.logits.graph.nodes if not n.users), *cotangents]
        stack: list[tuple[fx.Node, tuple[fx.Node, fx.Node] | None]] = [(n, None) for n in sinks]
        seen, formed = set(sinks) | gradients, {self.logits, *self.formed}
        while stack:
            node, border = stack.pop()
            for source in node.all_input_nodes:
                if source in seen or source not in self.depending:
                    continue
                seen.add(source)
                if known.get(source):
                    ends[source] = known[source]
                    continue
                through = border or ((source, node) if source in formed else None)
                if source in (self.logits, self.head.node) or (through and self.parts.kind(source) == "logits"):
                    raise NotFoundError(self._reader(*(through or (source, node))))
                stack.append((source, through))
        return ends

    def _sums_rows(self, node: fx.Node) -> bool:
        sums = Sum.of(node)
        if sums is None or str(value(sums.x).shape[-1]) != str(self.parts.classes):
            return False
        return value(sums.x).dim() == 2 and sums.dims == [0]

    def _before_zeros(self, node: fx.Node) -> fx.Node:
        return base(node_argument(node, "src")) if self.cut is not None and undoes(node, self.cut) else node

    def _reader(self, node: fx.Node, user: fx.Node) -> str:
        what = "a value of rows is" if self.parts.kind(node) == "row" else "its logits are"
        if node.target in REDUCTIONS:
            what = "a sum or maximum over its classes is"
        if user.op == "output":
            return f"{what} returned"
        where = source_line(user)
        if (cut := Slice.of(user)) and not all(isinstance(n, int) for n in value(cut.x).shape):
            return f"{what} cut at sizes that change" + (f" ({where})" if where else "")
        return f"{what} read by {user.target}" + (f" ({where})" if where else "")

    # ---- what comes back -----------------------------------------------------------------------------------------

    def _cotangents(self, slope: fx.Node, labelled: fx.Node, curve: Curve) -> dict[fx.Node, Factors]:
        """Return the leaves that come from backward, with what their gradients of logits are. Besides them there may be
        labels and masks. At best they are what is known without logits; else the last numbers of rows before the
        softmax."""
        try:
            return self._factors_of(slope, labelled, curve, Closure(self.parts, [labelled, slope]))
        except NotFoundError:
            return self._factors_of(slope, labelled, curve, Closure(self.parts, [labelled, slope], self.backward))

    def _factors_of(self, slope: fx.Node, labelled: fx.Node, curve: Curve, closure: Closure) -> dict[fx.Node, Factors]:
        floats = sorted((n for n in closure.leaves if is_float(n)), key=lambda n: n.name)
        strange = [n for n in floats if n not in self.backward]
        if strange:
            raise NotFoundError(f"%{strange[0].name} takes part in it: class weights, a temperature that is a tensor?")
        index = Gather(labelled).index
        found = {}
        for leaf in floats:
            found[leaf] = factors_of_gradient(self._trials(closure, leaf), slope, leaf, self.logits, index, curve)
            if not found[leaf]:
                raise NotFoundError("the gradient of its logits is not that of a cross-entropy")
        if not found:
            raise NotFoundError("the gradient of its logits is a constant")
        return found

    def _gradients(self) -> dict[str, fx.Node]:
        found: dict[str, fx.Node] = {}
        sums = [n for n in self.backward if n in self.depending and self.head.bias is not None and self._sums_rows(n)]
        for role, node in [(s.role, s.node) for s in self.head.grads] + [("grad_bias", n) for n in sums]:
            if role in found:
                raise NotFoundError(f"%{node.name} reads the gradient of its logits too")
            found[role] = node
        return found

    def _gradient_of_logits(self, node: fx.Node) -> fx.Node:
        return next(i for i in node.all_input_nodes if i in self.backward)

    def _curve(self) -> Curve:
        """Return what is made of the logits before the softmax, whose maximum is taken first."""
        maxima = [n for n in self.formed if n.target is aten.amax.default]
        curves = {self._curve_to(n.all_input_nodes[0]) for n in maxima}
        if not curves:
            raise NotFoundError("no softmax of it is taken (one that subtracts the maximum)")
        if len(curves) > 1:
            raise NotFoundError(f"{len(curves)} different softmaxes over its classes are taken")
        (curve,) = curves
        if curve.inner == 0 or curve.outer == 0:
            raise NotFoundError("its logits are multiplied by 0")
        return curve

    def _curve_to(self, node: fx.Node) -> Curve:
        factor, outer = 1.0, None
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


def _shows(view: fx.Node | None, x: fx.Node | None, transposed: bool) -> bool:
    """Return True if a matrix is `x`, or its transpose: the same elements of the same memory."""
    if view is None or x is None or base(view) is not base(x):
        return False
    a, b = value(view), value(x).t() if transposed else value(x)
    return same_sizes((*a.shape, *a.stride(), a.storage_offset()), (*b.shape, *b.stride(), b.storage_offset()))
