"""Read a pickle as data: its instructions are followed with a list of names at hand, and nothing is ever called.

A pickle is a program; loading it runs what it says. Here `GLOBAL os system` is a refusal, a permitted class is a label,
and calling one makes a record of its name and arguments.
"""

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

MOST_BYTES = 1 << 30
"""No metadata is longer; refused before it takes the memory."""


class Refused(ValueError):  # noqa: N818 - it is what happened to the file
    """A foreign file holds something that is not read; the message says what, and where."""


@dataclass(frozen=True)
class Named:
    """A class or function that a pickle mentions; no more than its name."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False)
class Made:
    """What calling a named thing would have made: its arguments, and the state that was put on it."""

    of: Named
    arguments: tuple[Any, ...]
    state: Any = None
    items: list[Any] = field(default_factory=list)

    def get(self, key: str, default: Any = None) -> Any:
        """A field of its state."""
        return self.state.get(key, default) if isinstance(self.state, dict) else default


class _Mark:
    pass


_MARK = _Mark()


def read_pickle(data: bytes, where: str, allowed: Mapping[str, frozenset[str]]) -> Any:
    """The value a pickle describes, with `Named` and `Made` in place of classes and objects.

    `allowed` has the names of every module that may be mentioned; anything else is `Refused`, as is every instruction
    that plain data does not need.
    """
    if len(data) > MOST_BYTES:
        raise Refused(f"{where} has {len(data)} bytes; no pickle above {MOST_BYTES} is read")
    machine = _Machine(where, allowed)
    try:
        for opcode, argument, position in pickletools.genops(data):
            if machine.step(opcode.name, argument, position or 0):
                return machine.result()
    except Refused:
        raise
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, UnicodeDecodeError) as error:
        raise Refused(f"{where} is no pickle that can be read: {type(error).__name__}: {error}") from None
    raise Refused(f"{where} is no pickle that can be read: it ends in the middle")


class _Machine:
    """The stack, the marks and the memo of a pickle."""

    def __init__(self, where: str, allowed: Mapping[str, frozenset[str]]) -> None:
        self.where, self.allowed = where, allowed
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any, position: int) -> bool:
        """Follow one instruction; true when it was the last."""
        if name == "STOP":
            return True
        if name in _PUSH:
            self.stack.append(argument)
        elif name in _CONSTANT:
            self.stack.append(_CONSTANT[name]())
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            self.stack.append(self._named(name, argument, position))
        elif name in _ACT:
            _ACT[name](self, argument)
        elif name not in ("PROTO", "FRAME"):
            raise Refused(f"{self.where} is refused: {name} at byte {position} is no part of plain data")
        return False

    def result(self) -> Any:
        """What is left at the end."""
        (value,) = self.stack
        return value

    def _named(self, opcode: str, argument: Any, position: int) -> Named:
        if opcode == "GLOBAL":
            module, _, name = str(argument).partition(" ")
        else:
            name, module = self.stack.pop(), self.stack.pop()
        if not isinstance(module, str) or not isinstance(name, str) or name not in self.allowed.get(module, ()):
            raise Refused(
                f"{self.where} is refused: it asks for {module}.{name} at byte {position}, which is none of the few "
                "classes such a file needs; loading it elsewhere could run code"
            )
        return Named(module, name)

    def above_mark(self) -> list[Any]:
        """What was pushed since the last mark, which goes too."""
        at = max(index for index, value in enumerate(self.stack) if value is _MARK)
        found = self.stack[at + 1 :]
        del self.stack[at:]
        return found

    def call(self, *_: Any) -> None:
        arguments, named = self.stack.pop(), self.stack.pop()
        if not isinstance(named, Named) or not isinstance(arguments, tuple):
            raise Refused(f"{self.where} is refused: it calls {named!r}, which is no class")
        self.stack.append(Made(named, arguments))

    def build(self, *_: Any) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if not isinstance(made, Made):
            raise Refused(f"{self.where} is refused: it sets the state of {type(made).__name__}, which is no object")
        made.state = state

    def append(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, Made):
            target.items.extend(values)
        elif isinstance(target, list):
            target.extend(values)
        else:
            raise Refused(f"{self.where} is refused: it appends to {type(target).__name__}, which is no list")

    def set_items(self, values: list[Any]) -> None:
        target = self.stack[-1]
        pairs = list(zip(values[::2], values[1::2], strict=True))
        if isinstance(target, Made):
            target.items.extend(pairs)
        elif isinstance(target, dict):
            target.update(pairs)
        else:
            raise Refused(f"{self.where} is refused: it sets items of {type(target).__name__}, which is no dictionary")

    def add_items(self, values: list[Any]) -> None:
        if not isinstance(self.stack[-1], set):
            raise Refused(f"{self.where} is refused: it adds to {type(self.stack[-1]).__name__}, which is no set")
        self.stack[-1].update(values)

    def tuple_of(self, count: int) -> None:
        values = tuple(self.stack[len(self.stack) - count :])
        if len(values) != count or any(value is _MARK for value in values):
            raise Refused(f"{self.where} is refused: it makes a tuple of values that are not there")
        del self.stack[len(self.stack) - count :]
        self.stack.append(values)


_PUSH = {
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT",
    "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
    "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
}  # fmt: skip
_CONSTANT: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False,
    "EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple, "EMPTY_SET": set, "MARK": lambda: _MARK,
}  # fmt: skip
_ACT: dict[str, Callable[[_Machine, Any], None]] = {
    "MEMOIZE": lambda m, a: m.memo.__setitem__(len(m.memo), m.stack[-1]),
    "PUT": lambda m, a: m.memo.__setitem__(a, m.stack[-1]),
    "BINPUT": lambda m, a: m.memo.__setitem__(a, m.stack[-1]),
    "LONG_BINPUT": lambda m, a: m.memo.__setitem__(a, m.stack[-1]),
    "GET": lambda m, a: m.stack.append(m.memo[a]),
    "BINGET": lambda m, a: m.stack.append(m.memo[a]),
    "LONG_BINGET": lambda m, a: m.stack.append(m.memo[a]),
    "POP": lambda m, a: (m.stack.pop(), None)[1],
    "TUPLE": lambda m, a: m.stack.append(tuple(m.above_mark())),
    "TUPLE1": lambda m, a: m.tuple_of(1),
    "TUPLE2": lambda m, a: m.tuple_of(2),
    "TUPLE3": lambda m, a: m.tuple_of(3),
    "APPEND": lambda m, a: m.append([m.stack.pop()]),
    "APPENDS": lambda m, a: m.append(m.above_mark()),
    "SETITEM": lambda m, a: m.set_items([m.stack.pop(), m.stack.pop()][::-1]),
    "SETITEMS": lambda m, a: m.set_items(m.above_mark()),
    "ADDITEMS": lambda m, a: m.add_items(m.above_mark()),
    "REDUCE": _Machine.call,
    "NEWOBJ": _Machine.call,
    "BUILD": _Machine.build,
    # What a pickle says of a storage; the reader of tensors looks it up.
    "BINPERSID": lambda m, a: m.stack.append(Made(Named("", "persistent"), (m.stack.pop(),))),
}
