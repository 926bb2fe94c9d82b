"""The expression language of specs and launch plans: 64-bit integers over names; text, JSON form and value.

An expression is parsed from text on the build side and travels as JSON: an integer, a name, or ``[op, arg, ...]``.
``["str", text]`` is a text literal, which only ``==`` and ``!=`` accept; ``["bytes", arg]`` is the size of a tensor.
Serving needs only the JSON form and the value, so this module uses nothing but the standard library.
"""

from __future__ import annotations

import ast
import functools
import math
import operator
import re
import reprlib
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from tkbuild.errors import ArgumentError

Node = int | str | tuple[Any, ...]
"""An expression's tree: an int, a name, or ``(op, node, ...)``."""

Value = int | str

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
FUNCTIONS = ("min", "max", "ceildiv", "align", "gcd", "bytes")
"""Names that are functions of the language and therefore cannot name anything else."""

_BINARY = ("+", "-", "*", "//", "%", "<", "<=", ">", ">=", "==", "!=")
_ARITY = dict.fromkeys((*_BINARY, "and", "or", "min", "max", "ceildiv", "align", "gcd"), 2)
_ARITY |= {"not": 1, "select": 3, "str": 1, "bytes": 1}
_FOLDED = ("min", "max", "gcd")
_MAX_TEXT = 2000
_MAX_DEPTH = 64

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_TEXT = re.compile(r"[A-Za-z0-9_.]*", re.ASCII)
_AST_OPS: dict[type[ast.AST], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.Mod: "%",
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
    ast.And: "and", ast.Or: "or",
}  # fmt: skip


@dataclass(frozen=True)
class Expr:
    """One expression. Equal trees are equal expressions; ``str`` gives text that parses back to the same tree."""

    node: Node

    @classmethod
    def parse(cls, text: str | int) -> Expr:
        """Return the expression that ``text`` spells; an int is itself.

        Raises: ArgumentError for anything outside the language, saying which part and what to write instead.
        """
        return _parse(text)

    @classmethod
    def from_json(cls, value: object) -> Expr:
        """Return the expression of a JSON form. Raises: ArgumentError for a wrong operator, arity, type or depth."""
        return cls(_node_from_json(value, _MAX_DEPTH))

    def to_json(self) -> Any:
        """Return the JSON form: an int, a name, or nested lists."""
        return _to_json(self.node)

    def __str__(self) -> str:
        return _text(self.node, 0)

    @property
    def is_name(self) -> bool:
        """Whether the expression is one bare name, which binds where a spec lets names bind."""
        return isinstance(self.node, str)

    @property
    def constant(self) -> int | None:
        """The value of an integer literal, else None."""
        return self.node if isinstance(self.node, int) else None

    def names(self) -> frozenset[str]:
        """Return the free names; arguments of ``bytes(...)`` are not among them."""
        return frozenset(name for op, name in _leaves(self.node) if op == "name")

    def tensors(self) -> frozenset[str]:
        """Return the tensors whose size is asked for with ``bytes(...)``."""
        return frozenset(name for op, name in _leaves(self.node) if op == "bytes")

    def texts(self) -> frozenset[str]:
        """Return the text literals."""
        return frozenset(name for op, name in _leaves(self.node) if op == "str")

    def evaluate(self, values: Mapping[str, Any], tensor_bytes: Mapping[str, int] | None = None) -> Any:
        """Return the value over ``values`` (ints, bools, texts, or objects with integer arithmetic such as SymInt).

        Truth values are 0 and 1; ``and``, ``or`` and ``if`` evaluate only what they need; division floors.
        Raises: ArgumentError for an unknown name, division by zero, a text in arithmetic, or a result beyond 64 bits.
        """
        return _evaluate(self.node, values, tensor_bytes or {})

    def substitute(self, values: Mapping[str, Value]) -> Expr:
        """Return the expression with ``values`` put in for names, and what became constant folded.

        Raises: ArgumentError if a folded part has no value (division by zero, overflow).
        """
        return Expr(_substitute(self.node, values))


# ---- text -> tree


@functools.lru_cache(maxsize=4096, typed=True)
def _parse(text: str | int) -> Expr:
    if isinstance(text, bool) or not isinstance(text, (str, int)):
        raise ArgumentError(f"an expression is text or an integer, not {text!r}", text=text)
    if isinstance(text, int):
        return Expr(_in_range(text, "the number"))
    if _NAME.fullmatch(text) and text not in _RESERVED:
        return Expr(text)
    tree = _syntax_tree(text.strip())
    _check_depth(tree, ast.iter_child_nodes, text)
    node = _convert(tree)
    _check_depth(node, lambda part: part[1:] if isinstance(part, tuple) else (), text)
    return Expr(node)


def _check_depth(root: Any, children: Callable[[Any], Iterable[Any]], text: str) -> None:
    level = [root]
    for _ in range(_MAX_DEPTH):
        level = [child for part in level for child in children(part)]
    if level:
        raise ArgumentError(f"{text[:60]!r}... is nested more than {_MAX_DEPTH} deep: split it", text=text)


_RESERVED = (*FUNCTIONS, "and", "or", "not", "if", "else", "in", "is", "lambda", "None", "True", "False")


def _syntax_tree(text: str) -> ast.expr:
    if len(text) > _MAX_TEXT or not text.isascii() or "#" in text or "\\" in text:
        rule = f"an expression is ASCII text without # and \\, at most {_MAX_TEXT} long"
        raise ArgumentError(f"{text[:60]!r}: {rule}", text=text)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as exc:
        where = f" at column {exc.offset}" if isinstance(exc, SyntaxError) and exc.offset else ""
        raise ArgumentError(f"{text!r} is no expression{where}: {_reason(exc)}", text=text) from exc


def _reason(exc: Exception) -> str:
    return exc.msg if isinstance(exc, SyntaxError) else "nested too deeply"


def _convert(tree: ast.expr) -> Node:
    """Return the node for a Python syntax tree, refusing all that is not in the language."""
    convert = _CONVERTERS.get(type(tree))
    if convert is None:
        raise _refuse(tree, _outside(tree))
    return convert(tree)


def _outside(tree: ast.expr) -> str:
    hints = {ast.Attribute: "names have no attributes", ast.Subscript: "nothing can be indexed"}
    return hints.get(type(tree), f"{type(tree).__name__} is not in the expression language") + f"; {_LANGUAGE}"


_LANGUAGE = "it has integers, names, + - * // %, comparisons, and/or/not, a if c else b, " + ", ".join(FUNCTIONS)


def _refuse(tree: ast.AST, reason: str) -> ArgumentError:
    text = ast.unparse(tree)[:200]
    return ArgumentError(f"{text!r}: {reason}", text=text)


def _constant(tree: ast.Constant) -> Node:
    if isinstance(tree.value, str):
        return ("str", _literal_text(tree.value))
    if not isinstance(tree.value, int):
        raise _refuse(tree, f"{type(tree.value).__name__} literals are not in the expression language; {_LANGUAGE}")
    return _in_range(int(tree.value), f"the number {str(tree.value)[:40]}")


def _literal_text(text: str) -> str:
    if not _TEXT.fullmatch(text):
        raise ArgumentError(f"{text[:60]!r}: a text consists of letters, digits, '_' and '.'", text=text)
    return text


def _name(tree: ast.Name) -> Node:
    if tree.id in FUNCTIONS:
        raise _refuse(tree, "this is a function and must be called")
    return tree.id


def _binary(tree: ast.BinOp) -> Node:
    op = _AST_OPS.get(type(tree.op))
    if op is None:
        hint = "division is //, and floors" if isinstance(tree.op, ast.Div) else _LANGUAGE
        raise _refuse(tree, f"{type(tree.op).__name__} is not in the expression language; {hint}")
    return (op, _number(tree.left), _number(tree.right))


def _unary(tree: ast.UnaryOp) -> Node:
    if isinstance(tree.op, ast.Not):
        return ("not", _number(tree.operand))
    if not isinstance(tree.op, ast.USub):
        raise _refuse(tree, f"{type(tree.op).__name__} is not in the expression language; {_LANGUAGE}")
    if isinstance(tree.operand, ast.Constant) and type(tree.operand.value) is int:
        return _in_range(-tree.operand.value, "the number")
    return ("-", 0, _number(tree.operand))


def _compare(tree: ast.Compare) -> Node:
    sides = [tree.left, *tree.comparators]
    parts = [_comparison(tree, op, a, b) for op, a, b in zip(tree.ops, sides, sides[1:], strict=False)]
    return functools.reduce(lambda left, right: ("and", left, right), parts)


def _comparison(tree: ast.Compare, op: ast.cmpop, left: ast.expr, right: ast.expr) -> Node:
    name = _AST_OPS.get(type(op))
    if name is None:
        raise _refuse(tree, f"{type(op).__name__} is not in the expression language; {_LANGUAGE}")
    side = _convert if name in ("==", "!=") else _number
    return (name, side(left), side(right))


def _boolean(tree: ast.BoolOp) -> Node:
    op = _AST_OPS[type(tree.op)]
    return functools.reduce(lambda left, right: (op, left, right), [_number(side) for side in tree.values])


def _select(tree: ast.IfExp) -> Node:
    return ("select", _number(tree.test), _number(tree.body), _number(tree.orelse))


def _call(tree: ast.Call) -> Node:
    name = tree.func.id if isinstance(tree.func, ast.Name) else None
    if name not in FUNCTIONS or tree.keywords:
        raise _refuse(tree, f"the functions are {', '.join(FUNCTIONS)}, without keywords")
    if name == "bytes":
        if len(tree.args) != 1 or not isinstance(tree.args[0], ast.Name):
            raise _refuse(tree, "bytes takes the name of one tensor")
        return ("bytes", tree.args[0].id)
    args = [_number(arg) for arg in tree.args]
    if len(args) < 2 or (len(args) > 2 and name not in _FOLDED):
        raise _refuse(tree, f"{name} takes two arguments" + (" or more" if name in _FOLDED else ""))
    return functools.reduce(lambda left, right: (name, left, right), args)


def _number(tree: ast.expr) -> Node:
    node = _convert(tree)
    if isinstance(node, tuple) and node[0] == "str":
        raise _refuse(tree, "text can only be compared with == and !=")
    return node


_CONVERTERS: dict[type[ast.expr], Callable[[Any], Node]] = {
    ast.Constant: _constant, ast.Name: _name, ast.BinOp: _binary, ast.UnaryOp: _unary,
    ast.Compare: _compare, ast.BoolOp: _boolean, ast.IfExp: _select, ast.Call: _call,
}  # fmt: skip


# ---- tree <-> JSON


def _node_from_json(value: object, depth: int) -> Node:
    if isinstance(value, str):
        if _NAME.fullmatch(value) and value not in _RESERVED:
            return value
    elif isinstance(value, int) and not isinstance(value, bool):
        return _in_range(value, "the number")
    elif isinstance(value, (list, tuple)) and value and depth:
        return _op_from_json(value, depth - 1)
    raise ArgumentError(f"{reprlib.repr(value)} is no JSON form of an expression", value=value)


def _op_from_json(value: list[Any] | tuple[Any, ...], depth: int) -> Node:
    op, *args = value
    if not isinstance(op, str) or _ARITY.get(op) != len(args):
        raise ArgumentError(f"{reprlib.repr(value)}: no operator {op!r} with {len(args)} arguments", value=value)
    if op == "str" and isinstance(args[0], str):
        return (op, _literal_text(args[0]))
    if op == "bytes" and isinstance(args[0], str) and _NAME.fullmatch(args[0]):
        return (op, args[0])
    if op in ("str", "bytes"):
        raise ArgumentError(f"{reprlib.repr(value)}: {op} takes a text", value=value)
    nodes = tuple(_node_from_json(arg, depth) for arg in args)
    if op not in ("==", "!=") and any(isinstance(node, tuple) and node[0] == "str" for node in nodes):
        raise ArgumentError(f"{reprlib.repr(value)}: text can only be compared with == and !=", value=value)
    return (op, *nodes)


def _to_json(node: Node) -> Any:
    return [_to_json(part) for part in node] if isinstance(node, tuple) else node


# ---- tree -> text

_LEVELS = {"select": 1, "or": 2, "and": 3, "not": 4}
_LEVELS |= dict.fromkeys(("<", "<=", ">", ">=", "==", "!="), 5)
_LEVELS |= {"+": 6, "-": 6, "*": 7, "//": 7, "%": 7}


def _text(node: Node, outer: int) -> str:
    """Return ``node`` as text, in parentheses where its operator binds less than the surrounding level asks for."""
    if not isinstance(node, tuple):
        return str(node)
    op, *args = node
    if op == "str":
        return repr(args[0])
    level = _LEVELS.get(op)
    if level is None:
        return f"{op}({', '.join(_text(arg, 0) for arg in args)})"
    inner = _operator_text(op, args, level)
    return f"({inner})" if level < outer else inner


def _operator_text(op: str, args: list[Node], level: int) -> str:
    if op == "not":
        return f"not {_text(args[0], level)}"
    if op == "select":
        condition, yes, no = args
        return f"{_text(yes, level + 1)} if {_text(condition, level + 1)} else {_text(no, level)}"
    left = level + 1 if level == _LEVELS["=="] else level
    return f"{_text(args[0], left)} {op} {_text(args[1], level + 1)}"


# ---- tree -> value


def _in_range(value: int, what: str) -> int:
    if not INT64_MIN <= value <= INT64_MAX:
        raise ArgumentError(f"{what} does not fit in 64 bits", value=value)
    return value


def _leaves(node: Node) -> list[tuple[str, str]]:
    """Return (kind, text) of every leaf that is a name, a text or a tensor."""
    if isinstance(node, str):
        return [("name", node)]
    if not isinstance(node, tuple):
        return []
    if node[0] in ("str", "bytes"):
        return [(node[0], node[1])]
    return [leaf for part in node[1:] for leaf in _leaves(part)]


def _ceildiv(a: Any, b: Any) -> Any:
    return -(-a // b)


def _align(a: Any, b: Any) -> Any:
    return _ceildiv(a, b) * b


_COMPUTE: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "%": operator.mod,
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    "min": min, "max": max, "ceildiv": _ceildiv, "align": _align, "gcd": math.gcd,
}  # fmt: skip


def _evaluate(node: Node, values: Mapping[str, Any], tensor_bytes: Mapping[str, int]) -> Any:
    if isinstance(node, int):
        return node
    if isinstance(node, str):
        return _lookup(node, values)
    op = node[0]
    if op == "str":
        return node[1]
    if op == "bytes":
        return _lookup(node[1], tensor_bytes)
    if op in ("and", "or", "not", "select"):
        return _decide(node, values, tensor_bytes)
    left, right = (_evaluate(part, values, tensor_bytes) for part in node[1:])
    return _compute(node, left, right)


def _lookup(name: str, values: Mapping[str, Any]) -> Any:
    try:
        value = values[name]
    except KeyError:
        known = ", ".join(sorted(map(str, values)))
        raise ArgumentError(f"no value for {name!r}; there are: {known or 'none'}", name=name) from None
    return int(value) if isinstance(value, bool) else value


def _decide(node: tuple[Any, ...], values: Mapping[str, Any], tensor_bytes: Mapping[str, int]) -> Any:
    op, first, *rest = node
    truth = bool(_truth(_evaluate(first, values, tensor_bytes), node))
    if op == "not":
        return int(not truth)
    if op == "select":
        return _evaluate(rest[0] if truth else rest[1], values, tensor_bytes)
    if truth == (op == "or"):
        return int(truth)
    return int(bool(_truth(_evaluate(rest[0], values, tensor_bytes), node)))


def _truth(value: Any, node: Node) -> Any:
    if isinstance(value, str):
        raise ArgumentError(f"{Expr(node)}: the text {value!r} is neither true nor false", expr=str(Expr(node)))
    return value


def _compute(node: tuple[Any, ...], left: Any, right: Any) -> Any:
    op = node[0]
    if op in ("==", "!="):
        return int((left == right) == (op == "=="))
    if isinstance(left, str) or isinstance(right, str):
        raise ArgumentError(f"{Expr(node)}: {left!r} and {right!r} are not both numbers", expr=str(Expr(node)))
    try:
        value = _COMPUTE[op](left, right)
    except ZeroDivisionError:
        raise ArgumentError(f"{Expr(node)}: division by zero", expr=str(Expr(node))) from None
    # Symbolic sizes pass unchecked: comparing them would add guards to the traced graph.
    if type(value) is int and not INT64_MIN <= value <= INT64_MAX:
        raise ArgumentError(f"{Expr(node)} does not fit in 64 bits", expr=str(Expr(node)), value=value)
    return int(value) if isinstance(value, bool) else value


def _substitute(node: Node, values: Mapping[str, Value]) -> Node:
    if isinstance(node, str):
        return _literal(values[node]) if node in values else node
    if not isinstance(node, tuple) or node[0] in ("str", "bytes"):
        return node
    parts = tuple(_substitute(part, values) for part in node[1:])
    return _fold((node[0], *parts))


def _fold(node: tuple[Any, ...]) -> Node:
    """Return ``node`` evaluated as far as its constant parts decide it."""
    op, *parts = node
    if op == "select" and isinstance(parts[0], int):
        return cast(Node, parts[1] if parts[0] else parts[2])
    if op in ("and", "or") and isinstance(parts[0], int):
        return _fold_logic(op, parts[0], parts[1])
    if all(isinstance(part, int) or (isinstance(part, tuple) and part[0] == "str") for part in parts):
        return _literal(_evaluate(node, {}, {}))
    return node


def _fold_logic(op: str, first: int, second: Node) -> Node:
    if bool(first) == (op == "or"):
        return int(bool(first))
    return int(bool(second)) if isinstance(second, int) else ("!=", second, 0)


def _literal(value: Value) -> Node:
    return ("str", value) if isinstance(value, str) else int(value)
