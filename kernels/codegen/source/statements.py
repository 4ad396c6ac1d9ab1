"""A generated function as data: expressions, statements, and what they read and write.

    expr("{} * {}", Name("v0"), Name("v1"))              an expression: source with places for others
    Assign(Name("v2"), …)                                 v2 = v0 * v1

Names are data. Which names a statement reads is asked of it, and names are replaced in it, without a look at its text;
`kernels/codegen/source/printer.py` writes the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias


@dataclass(frozen=True)
class Name:
    """A variable of a generated function."""

    text: str


@dataclass(frozen=True)
class Apply:
    """Source in which each {} is an expression."""

    template: str
    arguments: tuple[Expression, ...] = ()


Expression: TypeAlias = Name | Apply


def expr(template: str, *arguments: Expression | str | int) -> Apply:
    """Return `template` with `arguments` in the places of its {}; texts and numbers hold no variables."""
    return Apply(template, tuple(Apply(str(a)) if isinstance(a, (str, int)) else a for a in arguments))


def joined(operator: str, terms: Iterable[Expression]) -> Expression:
    """Return `terms` with `operator` between them."""
    found = tuple(terms)
    return found[0] if len(found) == 1 else Apply(operator.join("{}" for _ in found), found)


def all_of(*conditions: Expression | None) -> Expression | None:
    """Return the condition that all of `conditions` hold; None, which always holds, if there are none."""
    found = [c for c in conditions if c is not None]
    return joined(" & ", found) if found else None


def names_in(expression: Expression) -> Iterator[Name]:
    """Yield the variables that `expression` reads."""
    if isinstance(expression, Name):
        yield expression
    else:
        for argument in expression.arguments:
            yield from names_in(argument)


def with_names(expression: Expression, names: Mapping[Name, Expression]) -> Expression:
    """Return `expression` with others in place of the variables in `names`."""
    if isinstance(expression, Name):
        return names.get(expression, expression)
    return replace(expression, arguments=tuple(with_names(a, names) for a in expression.arguments))


@dataclass(frozen=True)
class Assign:
    """`target` = `value`."""

    target: Name
    value: Expression


@dataclass(frozen=True)
class Add:
    """`target` += `value`."""

    target: Name
    value: Expression


@dataclass(frozen=True)
class Write:
    """A store of `value` to memory, where `mask` holds."""

    pointer: Expression
    value: Expression
    mask: Expression | None = None


@dataclass(frozen=True)
class Call:
    """A call that gives nothing."""

    value: Expression


@dataclass(frozen=True)
class For:
    """A loop of `variable` over `span`."""

    variable: Name
    span: Expression
    body: tuple[Statement, ...]


@dataclass(frozen=True)
class If:
    """Conditions, each with what is done if it is the first that holds; None holds always."""

    branches: tuple[tuple[Expression | None, tuple[Statement, ...]], ...]


@dataclass(frozen=True)
class Return:
    """Return a tuple."""

    values: tuple[Expression, ...]


Statement: TypeAlias = Assign | Add | Write | Call | For | If | Return


@dataclass(frozen=True)
class Function:
    """A function compiled by Triton."""

    name: str
    arguments: tuple[Name, ...]
    body: tuple[Statement, ...]
    doc: str = ""


def expressions_of(statement: Statement) -> Iterator[Expression]:
    """Yield the expressions in a statement and in those within it."""
    match statement:
        case Assign() | Call():
            yield statement.value
        case Add():
            yield from (statement.target, statement.value)
        case Write():
            yield from (statement.pointer, statement.value)
            if statement.mask is not None:
                yield statement.mask
        case For():
            yield statement.span
            for inner in statement.body:
                yield from expressions_of(inner)
        case If():
            for condition, body in statement.branches:
                if condition is not None:
                    yield condition
                for inner in body:
                    yield from expressions_of(inner)
        case Return():
            yield from statement.values


def names_read(statements: Iterable[Statement]) -> set[Name]:
    """Return the variables that `statements` read."""
    return {name for s in statements for expression in expressions_of(s) for name in names_in(expression)}


def names_assigned(statements: Iterable[Statement]) -> set[Name]:
    """Return the variables to which `statements` give values, those of loops within them included."""
    found: set[Name] = set()
    for statement in statements:
        if isinstance(statement, (Assign, Add)):
            found.add(statement.target)
        elif isinstance(statement, For):
            found |= {statement.variable} | names_assigned(statement.body)
        elif isinstance(statement, If):
            for _, body in statement.branches:
                found |= names_assigned(body)
    return found


def replaced(statement: Statement, names: Mapping[Name, Expression]) -> Statement:
    """Return `statement` with expressions in place of the variables in `names`, which it reads and does not assign."""

    def new(expression: Expression) -> Expression:
        return with_names(expression, names)

    def all_new(body: Iterable[Statement]) -> tuple[Statement, ...]:
        return tuple(replaced(inner, names) for inner in body)

    match statement:
        case Assign() | Add() | Call():
            return replace(statement, value=new(statement.value))
        case Write(pointer, value, mask):
            return Write(new(pointer), new(value), mask if mask is None else new(mask))
        case For(variable, span, body):
            return For(variable, new(span), all_new(body))
        case If(branches):
            return If(tuple((c if c is None else new(c), all_new(body)) for c, body in branches))
        case Return(values):
            return Return(tuple(map(new, values)))
