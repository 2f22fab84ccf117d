"""Read a pickle as data: its opcodes are interpreted with a list of allowed names, and nothing is ever called.

A pickle is a program; loading it executes it. Here `GLOBAL os system` is refused, an allowed class is only a label, and
calling one makes a record of its name and arguments.
"""

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_PICKLE_BYTES = 1 << 30
"""No metadata is longer; refused before memory is allocated."""


class CheckpointImportError(ValueError):
    """A foreign file holds something that is not supported; the message says what, and where."""


@dataclass(frozen=True)
class GlobalRef:
    """A class or function that a pickle names; only its name."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False)
class PickledObject:
    """The object that a call would have made: its arguments, and its state."""

    cls: GlobalRef
    args: tuple[Any, ...]
    state: Any = None
    items: list[Any] = field(default_factory=list)

    def get(self, key: str, default: Any = None) -> Any:
        """A field of its state."""
        return self.state.get(key, default) if isinstance(self.state, dict) else default


class _Marker:
    pass


_MARK = _Marker()


def read_pickle(data: bytes, where: str, allowed: Mapping[str, frozenset[str]]) -> Any:
    """The value a pickle describes, with `GlobalRef` and `PickledObject` in place of classes and objects.

    `allowed` has the permitted names of every module; anything else is `CheckpointImportError`, as is every opcode that
    plain data does not need.
    """
    if len(data) > MAX_PICKLE_BYTES:
        raise CheckpointImportError(f"{where} has {len(data)} bytes; no pickle above {MAX_PICKLE_BYTES} is read")
    machine = _Unpickler(where, allowed)
    try:
        for opcode, argument, position in pickletools.genops(data):
            if machine.step(opcode.name, argument, position or 0):
                return machine.result()
    except CheckpointImportError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, UnicodeDecodeError) as error:
        raise CheckpointImportError(f"{where} is not a readable pickle: {type(error).__name__}: {error}") from None
    raise CheckpointImportError(f"{where} is not a readable pickle: it is truncated")


class _Unpickler:
    """The stack, the marks and the memo of a pickle."""

    def __init__(self, where: str, allowed: Mapping[str, frozenset[str]]) -> None:
        self.where, self.allowed = where, allowed
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any, position: int) -> bool:
        """Execute one opcode; true when it was the last."""
        if name == "STOP":
            return True
        if name in _PUSH_OPCODES:
            self.stack.append(argument)
        elif name in _CONSTANT_OPCODES:
            self.stack.append(_CONSTANT_OPCODES[name]())
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            self.stack.append(self._global_ref(name, argument, position))
        elif name in _OPCODES:
            _OPCODES[name](self, argument)
        elif name not in ("PROTO", "FRAME"):
            raise CheckpointImportError(
                f"{self.where} is refused: {name} at byte {position} does not occur in plain data"
            )
        return False

    def result(self) -> Any:
        """The value left on the stack."""
        (value,) = self.stack
        return value

    def _global_ref(self, opcode: str, argument: Any, position: int) -> GlobalRef:
        if opcode == "GLOBAL":
            module, _, name = str(argument).partition(" ")
        else:
            name, module = self.stack.pop(), self.stack.pop()
        if not isinstance(module, str) or not isinstance(name, str) or name not in self.allowed.get(module, ()):
            raise CheckpointImportError(
                f"{self.where} is refused: it asks for {module}.{name} at byte {position}, which is none of the few "
                "classes such a file needs; loading it elsewhere could execute code"
            )
        return GlobalRef(module, name)

    def pop_to_mark(self) -> list[Any]:
        """Pop everything since the last mark, and the mark."""
        at = max(index for index, value in enumerate(self.stack) if value is _MARK)
        found = self.stack[at + 1 :]
        del self.stack[at:]
        return found

    def call(self, *_: Any) -> None:
        arguments, named = self.stack.pop(), self.stack.pop()
        if not isinstance(named, GlobalRef) or not isinstance(arguments, tuple):
            raise CheckpointImportError(f"{self.where} is refused: it calls {named!r}, which is not a class")
        self.stack.append(PickledObject(named, arguments))

    def build(self, *_: Any) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if not isinstance(made, PickledObject):
            raise CheckpointImportError(
                f"{self.where} is refused: it sets the state of {type(made).__name__}, which is not an object"
            )
        made.state = state

    def append(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, PickledObject):
            target.items.extend(values)
        elif isinstance(target, list):
            target.extend(values)
        else:
            raise CheckpointImportError(
                f"{self.where} is refused: it appends to {type(target).__name__}, which is not a list"
            )

    def set_items(self, values: list[Any]) -> None:
        target = self.stack[-1]
        pairs = list(zip(values[::2], values[1::2], strict=True))
        if isinstance(target, PickledObject):
            target.items.extend(pairs)
        elif isinstance(target, dict):
            target.update(pairs)
        else:
            raise CheckpointImportError(
                f"{self.where} is refused: it sets items of {type(target).__name__}, which is not a dictionary"
            )

    def add_items(self, values: list[Any]) -> None:
        if not isinstance(self.stack[-1], set):
            raise CheckpointImportError(
                f"{self.where} is refused: it adds to {type(self.stack[-1]).__name__}, which is not a set"
            )
        self.stack[-1].update(values)

    def make_tuple(self, count: int) -> None:
        values = tuple(self.stack[len(self.stack) - count :])
        if len(values) != count or any(value is _MARK for value in values):
            raise CheckpointImportError(f"{self.where} is refused: it makes a tuple of values that are not there")
        del self.stack[len(self.stack) - count :]
        self.stack.append(values)


_PUSH_OPCODES = {
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT",
    "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
    "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
}  # fmt: skip
_CONSTANT_OPCODES: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False,
    "EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple, "EMPTY_SET": set, "MARK": lambda: _MARK,
}  # fmt: skip
_OPCODES: dict[str, Callable[[_Unpickler, Any], None]] = {
    "MEMOIZE": lambda m, a: m.memo.__setitem__(len(m.memo), m.stack[-1]),
    "PUT": lambda m, a: m.memo.__setitem__(a, m.stack[-1]),
    "BINPUT": lambda m, a: m.memo.__setitem__(a, m.stack[-1]),
    "LONG_BINPUT": lambda m, a: m.memo.__setitem__(a, m.stack[-1]),
    "GET": lambda m, a: m.stack.append(m.memo[a]),
    "BINGET": lambda m, a: m.stack.append(m.memo[a]),
    "LONG_BINGET": lambda m, a: m.stack.append(m.memo[a]),
    "POP": lambda m, a: (m.stack.pop(), None)[1],
    "TUPLE": lambda m, a: m.stack.append(tuple(m.pop_to_mark())),
    "TUPLE1": lambda m, a: m.make_tuple(1),
    "TUPLE2": lambda m, a: m.make_tuple(2),
    "TUPLE3": lambda m, a: m.make_tuple(3),
    "APPEND": lambda m, a: m.append([m.stack.pop()]),
    "APPENDS": lambda m, a: m.append(m.pop_to_mark()),
    "SETITEM": lambda m, a: m.set_items([m.stack.pop(), m.stack.pop()][::-1]),
    "SETITEMS": lambda m, a: m.set_items(m.pop_to_mark()),
    "ADDITEMS": lambda m, a: m.add_items(m.pop_to_mark()),
    "REDUCE": _Unpickler.call,
    "NEWOBJ": _Unpickler.call,
    "BUILD": _Unpickler.build,
    # A reference to a storage; the tensor reader resolves it.
    "BINPERSID": lambda m, a: m.stack.append(PickledObject(GlobalRef("", "persistent"), (m.stack.pop(),))),
}
