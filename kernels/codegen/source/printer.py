"""Statements (`kernels/codegen/source/statements.py`) written as the source of Triton functions."""

from __future__ import annotations

from collections.abc import Iterable

from fp8compile.kernels.codegen.source.statements import (
    Add,
    Assign,
    Call,
    Expression,
    For,
    Function,
    If,
    Name,
    Return,
    Statement,
    Write,
)


def text_of(expression: Expression) -> str:
    """Return the source of an expression."""
    if isinstance(expression, Name):
        return expression.text
    return expression.template.format(*map(text_of, expression.arguments))


def lines_of(statement: Statement) -> list[str]:
    """Return the lines of a statement."""
    match statement:
        case Assign(target, value):
            return [f"{target.text} = {text_of(value)}"]
        case Add(target, value):
            return [f"{target.text} += {text_of(value)}"]
        case Call(value):
            return [text_of(value)]
        case Write(pointer, value, mask):
            condition = "" if mask is None else f", mask={text_of(mask)}"
            return [f"tl.store({text_of(pointer)}, {text_of(value)}{condition})"]
        case For(variable, span, body):
            return [f"for {variable.text} in {text_of(span)}:", *_indented(body)]
        case If(branches):
            return _lines_of_branches(branches)
        case Return(values):
            return [f"return {', '.join(map(text_of, values))}{',' if len(values) == 1 else ''}"]


def _lines_of_branches(branches: tuple[tuple[Expression | None, tuple[Statement, ...]], ...]) -> list[str]:
    lines = []
    for n, (condition, body) in enumerate(branches):
        word = "elif" if n else "if"
        lines.append("else:" if condition is None else f"{word} {text_of(condition)}:")
        lines += _indented(body)
    return lines


def _indented(body: Iterable[Statement]) -> list[str]:
    return [f"    {line}" for statement in body for line in lines_of(statement)]


def source_of(function: Function) -> str:
    """Return the source of a function."""
    arguments = ", ".join(name.text for name in function.arguments)
    doc = [f'    """{function.doc}"""'] if function.doc else []
    return "\n".join(["@triton.jit", f"def {function.name}({arguments}):", *doc, *_indented(function.body)])
