"""The document of an exported program, checked value by value before PyTorch sees it.

PyTorch trusts it: sizes are evaluated as Python (``sympify``), operators are looked up by dotted names from ``torch``
on, tree specs import modules by name, guards are code, and names of nodes are pasted into the source of the module that
it generates. So a new document is made of what is known here and nothing else. Its shape is that of the installed
PyTorch's own classes (``torch/_export/serde/schema.py``); the texts that they may hold are listed here, field by field:
names are identifiers, sizes are arithmetic, operators are those of a list. Metadata, guards, custom objects, and every
field of text that a newer schema adds, are left out or refused."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from dataclasses import MISSING
from enum import IntEnum
from functools import cache
from types import ModuleType, NoneType, UnionType
from typing import Any, NoReturn, TypeAlias, Union, cast, get_args, get_origin, get_type_hints

from graphmem.base.documents import LARGEST_NUMBER, parse_json, shown
from graphmem.torch_names import private

_LOST = "programs of torch.export cannot be read"

Check: TypeAlias = Callable[[object], object]
TextCheck: TypeAlias = Callable[[object], str]


class Refused(ValueError):
    """A value that is not accepted; ``place`` is where in the document, from the outside in."""

    def __init__(self, reason: str, place: tuple[str, ...] = ()) -> None:
        super().__init__(reason)
        self.reason = reason
        self.place = place

    def __str__(self) -> str:
        return f"{'.'.join(self.place[:12])}: {self.reason}" if self.place else self.reason


# --- plain values -----------------------------------------------------------------------------------------------------


def integer(value: object) -> int:
    """A whole number of 64 bits."""
    if type(value) is not int or abs(value) > LARGEST_NUMBER:
        raise Refused(f"{shown(value)} is no whole number of 64 bits")
    return value


def number(value: object) -> float | str:
    """A number, or one of the words for those that JSON lacks."""
    if type(value) in (int, float) or value in ("Infinity", "-Infinity", "NaN"):
        return cast("float | str", value)
    raise Refused(f"{shown(value)} is no number")


def boolean(value: object) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise Refused(f"{shown(value)} is neither true nor false")
    return value


def _text_that(accepts: Callable[[str], object], words: str) -> TextCheck:
    def checked(value: object) -> str:
        if not isinstance(value, str) or len(value) > _LONGEST_TEXT or not accepts(value):
            raise Refused(f"{shown(value)} is no {words}")
        return value

    return checked


_LONGEST_TEXT, _LONGEST_NAME = 10_000, 1000
_SYMBOL = re.compile(r"_?[a-z]{1,4}[0-9]{1,6}")

#: Text that is used as such.
text = _text_that(lambda value: True, "text")
#: A name that becomes one in generated Python source.
identifier = _text_that(lambda value: value.isidentifier() and len(value) <= _LONGEST_NAME, "identifier")
#: The dotted name of a parameter or buffer.
attribute = _text_that(re.compile(r"[\w][\w.:/@+-]{0,999}").fullmatch, "name of a parameter or buffer")
#: The name of a symbolic size: ``s0``, ``u12``. PyTorch counts up to its number.
symbol = _text_that(_SYMBOL.fullmatch, "symbol of a size")


# --- operators --------------------------------------------------------------------------------------------------------

_OPERATORS = frozenset((
    "add", "and_", "eq", "floordiv", "ge", "getitem", "gt", "le", "lshift", "lt", "mod", "mul", "ne", "neg", "not_",
    "or_", "pos", "pow", "rshift", "sub", "truediv", "xor",
))  # fmt: skip
_MATH = frozenset(("acos", "asin", "atan", "ceil", "cos", "cosh", "floor", "log2", "sin", "sinh", "sqrt", "tan",
                   "tanh", "trunc"))  # fmt: skip
_SYM = re.compile(r"torch\._?sym_[a-z0-9_]{1,20}")
_LIBRARIES = frozenset(("aten", "prims", "torchvision", "quantized_decomposed", "_c10d_functional"))
_HIGHER_ORDER = frozenset((
    "associative_scan", "auto_functionalized", "auto_functionalized_v2", "cond", "flex_attention",
    "flex_attention_backward", "map_impl", "out_dtype", "scan", "strict_mode", "tag_activation_checkpoint",
    "while_loop", "with_effects", "wrap", "wrap_activation_checkpoint", "wrap_with_autocast",
    "wrap_with_set_grad_enabled",
))  # fmt: skip
#: ``aten::from_file`` opens, and with ``shared`` creates, the file it is given.
_TOUCHES_FILES = frozenset(("from_file",))
_OVERLOAD = re.compile(r"torch\.ops\.(\w+)\.(\w+)\.(\w+)")


def operator(value: object) -> str:
    """The target of a node. Raises :class:`Refused` for what is not known to compute with tensors and sizes alone."""
    if isinstance(value, str) and len(value) < 200 and (_of_sizes(value) or _of_tensors(value)):
        return value
    raise Refused(f"the operator {shown(value)} is none that is known to compute with tensors alone")


def _of_sizes(name: str) -> bool:
    first, _, rest = name.partition(".")
    known = {"_operator": _OPERATORS, "math": _MATH}.get(first, ())
    return rest in known or _SYM.fullmatch(name) is not None


def _of_tensors(name: str) -> bool:
    """Whether it is a known operator of the dispatcher's; TorchScript's own (``aten::save``) are not there."""
    if name.startswith("torch.ops.higher_order."):
        return name.rpartition(".")[2] in _HIGHER_ORDER
    found = _OVERLOAD.fullmatch(name)
    if found is None or found[1] not in _LIBRARIES or found[2] in _TOUCHES_FILES:
        return False
    qualified = f"{found[1]}::{found[2]}" + ("" if found[3] == "default" else f".{found[3]}")
    try:
        return bool(private("torch._C._dispatch_has_kernel", _LOST)(qualified))
    except RuntimeError:
        return False


# --- sizes ------------------------------------------------------------------------------------------------------------

_FUNCTIONS = frozenset((
    "Abs", "And", "CeilDiv", "CeilToInt", "CleanDiv", "Eq", "FloatPow", "FloatTrueDiv", "FloorDiv", "FloorToInt", "Ge",
    "Gt", "Identity", "IntTrueDiv", "IsNonOverlappingAndDenseIndicator", "LShift", "Le", "Lt", "Max", "Min", "Mod",
    "ModularIndexing", "Ne", "Not", "Or", "PowByNatural", "PythonMod", "RShift", "RoundDecimal", "RoundToInt",
    "ToFloat", "TruncToFloat", "TruncToInt", "Where", "ceiling", "floor", "sqrt", "Add", "Mul", "Pow", "Rational",
    "Equality", "Unequality", "GreaterThan", "LessThan", "StrictGreaterThan", "StrictLessThan",
))  # fmt: skip
_WORDS = frozenset(("True", "False", "true", "false", "int_oo", "oo"))
#: Leaves as sympy's ``srepr`` writes them, which PyTorch stores: ``Symbol('s0', integer=True)``, ``Integer(2)``.
_LEAF_SYMBOL = re.compile(r"Symbol\('_?[a-z]{1,4}[0-9]{1,6}'(?:, [a-z]{1,20}=(?:True|False)){0,6}\)")
_LEAF_INTEGER = re.compile(r"Integer\((-?[0-9]{1,20})\)")
_LEAF_FLOAT = re.compile(r"Float\('-?[0-9]{1,20}(?:\.[0-9]{0,40})?(?:e[+-]?[0-9]{1,3})?'(?:, precision=[0-9]{1,3})?\)")
_TOKEN = re.compile(
    r"\s*(?:(?P<name>[A-Za-z_]\w*)|(?P<number>\d{1,20}(?:\.\d{0,20})?(?:e[+-]?\d{1,3})?)|\*\*|//|[<>=!]=|[-+*/%(),<>&|~])"
)
_LONGEST_EXPRESSION = 20_000
_MOST_NODES = 300
#: Exponents, and how many powers may stand in one another, so that no number grows without bounds.
_LARGEST_EXPONENT, _DEEPEST_POWER = 16, 3
_POWERS = frozenset(("FloatPow", "LShift", "Pow", "PowByNatural", "RShift"))
_ALLOWED = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Call, ast.Name, ast.Constant, ast.Load, ast.Add, ast.Sub,
    ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.USub, ast.UAdd, ast.Invert, ast.BitAnd, ast.BitOr, ast.Eq,
    ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE,
)  # fmt: skip


def expression(value: object) -> str:
    """Arithmetic on symbols of sizes: PyTorch evaluates it as Python. First no token but those of arithmetic is let
    through, then no form of expression."""
    refused = Refused(f"{shown(value)} is no expression of a size")
    if not isinstance(value, str) or not 0 < len(value) <= _LONGEST_EXPRESSION:
        raise refused
    plain = _LEAF_FLOAT.sub("1.5", _LEAF_INTEGER.sub(r"\1", _LEAF_SYMBOL.sub("s0", value))).strip()
    position = 0
    while position < len(plain):
        token = _TOKEN.match(plain, position)
        if token is None:
            raise refused
        name = token["name"]
        if name and name not in _FUNCTIONS and name not in _WORDS and not _SYMBOL.fullmatch(name):
            raise Refused(f"{refused}: {shown(name)} is no function of sizes")
        position = token.end()
    try:
        tree = ast.parse(plain, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise refused from None
    nodes = list(ast.walk(tree))
    if len(nodes) > _MOST_NODES or not all(isinstance(node, _ALLOWED) for node in nodes):
        raise refused
    _check_powers(tree.body, refused)
    return value


def _check_powers(node: ast.expr, refused: Refused, depth: int = 0) -> None:
    exponent = None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        exponent = node.right
    elif isinstance(node, ast.Call):
        if not isinstance(node.func, ast.Name) or node.func.id not in _FUNCTIONS or node.keywords:
            raise refused
        if node.func.id in _POWERS and len(node.args) == 2:
            exponent = node.args[1]
    if exponent is not None:
        depth += 1
        if depth > _DEEPEST_POWER or not _is_small(exponent):
            raise Refused(f"{refused}: its powers are too large")
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            _check_powers(child, refused, depth)


def _is_small(exponent: ast.expr) -> bool:
    """Whether it is a symbol, a small number, or a fraction of two of them."""
    if isinstance(exponent, ast.UnaryOp):
        return _is_small(exponent.operand)
    if isinstance(exponent, ast.Call) and isinstance(exponent.func, ast.Name) and exponent.func.id == "Rational":
        return all(isinstance(part, ast.Constant) and _is_small(part) for part in exponent.args)
    if isinstance(exponent, ast.Constant):
        return isinstance(exponent.value, (int, float)) and exponent.value <= _LARGEST_EXPONENT
    return isinstance(exponent, ast.Name)


# --- tree specs -------------------------------------------------------------------------------------------------------

_CONTAINERS = ("builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict")
_DEEPEST_TREE = 40


def output_spec(value: object) -> str:
    """How outputs are nested, in tuples, lists and dicts. Other types PyTorch would import; those that have names for
    their parts (the outputs of transformers' models) become dicts."""
    return json.dumps([1, _spec_node(_parsed_spec(value), 0, True)])


def input_spec(value: object) -> str:
    """How (positional, keyword) arguments are nested, whose names become those of a function in Python source."""
    root = _spec_node(_parsed_spec(value), 0, False)
    named = root["children_spec"][1:2]
    if root["type"] != "builtins.tuple" or not named or named[0]["type"] != "builtins.dict":
        raise Refused("the inputs are no (arguments, keyword arguments)")
    for name in json.loads(named[0]["context"]):
        identifier(name)
    return json.dumps([1, root])


def _parsed_spec(value: object) -> object:
    try:
        protocol, root = parse_json(text(value))
    except (ValueError, TypeError):
        raise Refused(f"{shown(value)} is no tree spec") from None
    if protocol != 1:
        raise Refused(f"{shown(protocol)} is no known protocol of tree specs")
    return root


def _spec_node(node: object, depth: int, is_output: bool) -> dict[str, Any]:
    if not isinstance(node, dict) or not {"type", "context", "children_spec"} <= node.keys() or depth > _DEEPEST_TREE:
        raise Refused(f"{shown(node)} is no tree spec")
    children = node["children_spec"]
    if not isinstance(children, list):
        raise Refused(f"{shown(children)} is no list of tree specs")
    if node["type"] is None:
        if node["context"] is not None or children:
            raise Refused("a leaf of a tree spec has something in it")
        return {"type": None, "context": None, "children_spec": []}
    kind = node["type"]
    if kind not in _CONTAINERS:
        if not is_output:
            raise Refused(f"inputs of the type {shown(kind)}, which PyTorch would have to import")
        kind = "builtins.dict"
    return {
        "type": kind,
        "context": _context(kind, node["context"], len(children)),
        "children_spec": [_spec_node(child, depth + 1, is_output) for child in children],
    }


def _context(kind: str, context: object, count: int) -> str:
    try:
        keys = parse_json(text(context))
    except ValueError:
        raise Refused(f"{shown(context)} is no context of a tree spec") from None
    if kind in ("builtins.tuple", "builtins.list"):
        if keys is not None:
            raise Refused(f"{shown(keys)} is no context of a {kind}")
        return "null"
    if not isinstance(keys, list) or len(keys) != count or not all(type(key) in (str, int) for key in keys):
        raise Refused(f"{shown(keys)} are no keys of a dict")
    return json.dumps(keys)


# --- composite values -------------------------------------------------------------------------------------------------


def _optional(check: Check) -> Check:
    return lambda value: None if value is None else check(value)


def _list(check: Check) -> Check:
    def checked(value: object) -> list[object]:
        if not isinstance(value, list):
            raise Refused(f"{shown(value)} is no list")
        return [_at(str(index), check, item) for index, item in enumerate(value)]

    return checked


def _mapping(key: TextCheck, check: Check) -> Check:
    def checked(value: object) -> dict[str, object]:
        if not isinstance(value, dict):
            raise Refused(f"{shown(value)} is no mapping")
        return {key(name): _at(name, check, item) for name, item in value.items()}

    return checked


def _record(checks: Mapping[str, Check], optional: Container[str] = ()) -> Check:
    """Those fields; others are another version's, and left out."""

    def checked(value: object) -> dict[str, object]:
        if not isinstance(value, dict):
            raise Refused(f"{shown(value)} is no record")
        for name in checks:
            if name not in value and name not in optional:
                raise Refused(f"{name} is missing")
        return {name: _at(name, check, value[name]) for name, check in checks.items() if name in value}

    return checked


def _union(cases: Mapping[str, Check]) -> Check:
    def checked(value: object) -> dict[str, object]:
        if not isinstance(value, dict) or len(value) != 1:
            raise Refused(f"{shown(value)} is not of a known kind")
        ((kind, item),) = value.items()
        if kind not in cases:
            raise Refused(f"{shown(kind)} is not of a known kind")
        return {kind: _at(kind, cases[kind], item)}

    return checked


def _at(name: str, check: Check, value: object) -> object:
    try:
        return check(value)
    except Refused as error:
        raise Refused(error.reason, (name[:60], *error.place)) from None


# --- PyTorch's schema -------------------------------------------------------------------------------------------------
#
# The classes of schema.py say of every field whether it is a number, a record, a list or one of several kinds. Of a
# text, and of the names in a mapping, they say nothing: what is harmless there is said here.

#: What the text, or a mapping's name, in a field may be. A field of text that is not here is left out of the document,
#: and where PyTorch cannot do without it the program is refused.
_TEXTS: Mapping[str, TextCheck] = {
    **dict.fromkeys(("name", "as_name", "type", "user_input_name", "forward_arg_names"), identifier),
    **dict.fromkeys(("parameter_name", "buffer_name", "tensor_constant_name"), attribute),
    **dict.fromkeys(("tensor_values", "sym_int_values", "sym_bool_values", "sym_float_values"), identifier),
    **dict.fromkeys(("as_string", "as_strings", "as_string_to_argument", "custom_obj_values"), text),
    **dict.fromkeys(("verifiers", "torch_version", "opset_version"), text),
    **dict.fromkeys(("target", "as_operator"), operator),
    "NamedArgument.name": lambda value: identifier(value) if value else "",  # positional arguments have none
    "range_constraints": symbol,
    "expr_str": expression,
    "in_spec": input_spec,
    "out_spec": output_spec,
}
_NUMBERS: Mapping[type, Check] = {int: integer, float: number, bool: boolean}


class _Unknown(Exception):
    """A field of PyTorch's schema for whose text there is no check."""


class _Schema:
    """Checks made of the classes of ``torch/_export/serde/schema.py``, each once."""

    def __init__(self, schema: ModuleType) -> None:
        self.schema = schema
        self._made: dict[str, Check] = {
            "CustomObjArgument": _needs_unpickling,
            "InputToCustomObjSpec": _needs_unpickling,
        }

    def of(self, kind: type) -> Check:
        """The check of a record or a union. Raises :class:`_Unknown`."""
        name = kind.__name__
        if name not in self._made:
            self._made[name] = lambda value: self._made[name](value)  # a graph holds arguments, which hold graphs
            self._made[name] = self._union_of(kind) if issubclass(kind, self.schema._Union) else self._record_of(kind)
        return self._made[name]

    def _union_of(self, kind: type) -> Check:
        cases = {}
        for name, hint in get_type_hints(kind).items():
            if name.startswith("_"):  # the class's own
                continue
            with suppress(_Unknown):
                cases[name] = self._value(hint, self._text(kind, name))
        return _union(cases)

    def _record_of(self, kind: type) -> Check:
        hints = get_type_hints(kind)
        checks: dict[str, Check] = {}
        optional: set[str] = set()
        for field in dataclasses.fields(kind):
            place = f"{kind.__name__}.{field.name}"
            is_needed = field.default is MISSING and field.default_factory is MISSING
            try:
                check = _SPECIAL.get(place) or self._value(hints[field.name], self._text(kind, field.name))
            except _Unknown:
                if is_needed:
                    raise _Unknown(place) from None
                continue
            checks[field.name] = check
            if not is_needed:
                optional.add(field.name)
        return _record(checks, optional)

    def _text(self, kind: type, name: str) -> TextCheck | None:
        return _TEXTS.get(f"{kind.__name__}.{name}", _TEXTS.get(name))

    def _value(self, hint: type, of_text: TextCheck | None) -> Check:
        """The check of an annotated type; ``of_text`` is that of the text in it."""
        origin, inner = get_origin(hint), get_args(hint)
        if origin in (Union, UnionType):
            (kind,) = (one for one in inner if one is not NoneType)
            return _optional(self._value(kind, of_text))
        if origin is list:
            return _list(self._value(inner[0], of_text))
        if (hint is str or origin is dict) and of_text is None:
            raise _Unknown(hint)
        if origin is dict:
            return _mapping(cast(TextCheck, of_text), self._value(inner[1], None))
        if hint is str:
            return cast(TextCheck, of_text)
        if isinstance(hint, type) and issubclass(hint, IntEnum):
            return integer
        return _NUMBERS[hint] if hint in _NUMBERS else self.of(hint)


def _needs_unpickling(value: object) -> NoReturn:
    raise Refused("a custom object, which would have to be unpickled")


def _call_graph(value: object) -> list[object]:
    """The call of the whole program; those of its modules serve to take it apart again, which nobody does here."""
    if not isinstance(value, list) or not value or not isinstance(value[0], dict) or value[0].get("fqn") != "":
        raise Refused("the call of the whole program is missing")
    return [{"fqn": "", "signature": _at("0", _signature, value[0])}]


def _signature(value: object) -> object:
    assert isinstance(value, dict)
    return _at("signature", check_of("ModuleCallSignature"), value.get("signature"))


#: Fields that are not what their type says: of the calls only the whole program's is kept, of the metadata nothing.
_SPECIAL: Mapping[str, Check] = {"GraphModule.module_call_graph": _call_graph, "Node.metadata": lambda value: {}}


@cache
def _schema() -> _Schema:
    return _Schema(private("torch._export.serde.schema", _LOST))


def check_of(name: str) -> Check:
    """The check of a class of the installed PyTorch's schema. Raises :class:`Refused` where that lacks the class, or
    needs a field in it that is not known."""
    made = _schema()
    try:
        return made.of(getattr(made.schema, name))
    except (AttributeError, KeyError, ValueError, _Unknown) as error:
        raise Refused(f"this PyTorch's {name} of exported programs is not known: {error}") from None


#: Where a weight or constant lies in the archive: ``PayloadMeta``, which older versions of PyTorch lack.
payload = _record(
    {
        "path_name": text,
        "is_param": boolean,
        "use_pickle": boolean,
        "tensor_meta": _optional(lambda value: check_of("TensorMeta")(value)),
    },
    optional=("tensor_meta",),
)


def checked_program(document: object) -> dict[str, object]:
    """A program document of known and harmless values alone. Raises :class:`Refused`."""
    try:
        cleaned = cast("dict[str, Any]", check_of("ExportedProgram")(document))
    except RecursionError:
        raise Refused("it is nested too deeply") from None
    cleaned["guards_code"] = []
    return cleaned
