"""The rules of the house as functions from a file's text to what breaks them, one a rule.

Each returns a list of `(line, what)`; the tests run them over the tree, and over a small text that breaks them.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

Breach = tuple[int, str]

LONGEST_FILE = 500
LONGEST_README = 80
JUNK_DRAWERS = {"util", "utils", "helper", "helpers", "common", "misc"}

_VENDOR_WORD = re.compile(r"(?<![a-z])(cuda|nccl)(?![a-z])", re.IGNORECASE)
_ENVIRONMENT = {f"os.{name}" for name in ("environ", "environb", "getenv", "getenvb", "putenv", "unsetenv")}
_PICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
_PICKLING_CALLS = {
    "torch.load",
    "torch.save",
    "torch.serialization.load",
    "torch.serialization.save",
    # These pickle what they send; a peer's bytes would be run as code.
    "torch.distributed.all_gather_object",
    "torch.distributed.broadcast_object_list",
    "torch.distributed.gather_object",
    "torch.distributed.recv_object_list",
    "torch.distributed.scatter_object_list",
    "torch.distributed.send_object_list",
    # The metadata file of these is a pickle.
    "torch.distributed.checkpoint.FileSystemReader",
    "torch.distributed.checkpoint.FileSystemWriter",
    "torch.distributed.checkpoint.filesystem.FileSystemReader",
    "torch.distributed.checkpoint.filesystem.FileSystemWriter",
}
_BROAD = {"Exception", "BaseException"}
_LOCAL_PATH = re.compile(r"(?<![\w.~}$)-])/(?:root|work|home)/")
_REGISTRY = re.compile(
    r"(?:https?|file)://[^\s/]*(?:pypi|pythonhosted|registry|mirror|artifactory|nexus|download\.pytorch)[^\s/]*"
    r"|--(?:extra-)?index-url|/opt/(?:pypi|wheels)",
    re.IGNORECASE,
)


def private_torch(text: str) -> list[Breach]:
    """What torch keeps private: modules and names with a leading underscore; operators (`torch.ops`) are not."""
    return [
        (line, f"{name} belongs in torch_compat")
        for line, name in _torch_names(ast.parse(text))
        if any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
    ]


def _torch_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.split(".")[0] == "torch")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute) and re.fullmatch(r"torch\.(?!ops\.)[\w.]+", name := ast.unparse(node)):
            yield node.lineno, name


def vendor_words(text: str) -> list[Breach]:
    """String literals that name one vendor's device or library; documentation strings may speak of them."""
    tree = ast.parse(text)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        (node.lineno, f"the literal {node.value!r} belongs in chips/")
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in prose
        and _VENDOR_WORD.search(node.value)
    ]


def environment_access(text: str) -> list[Breach]:
    """Reads and writes of the environment, however they were imported."""
    return [(line, f"{name} belongs in cli/") for line, name in _names_used(ast.parse(text)) if name in _ENVIRONMENT]


def pickling(text: str) -> list[Breach]:
    """Whatever turns bytes into objects by running them."""
    tree = ast.parse(text)
    used = list(_names_used(tree))
    breaches = [(line, f"{name} pickles") for line, name in used if name in _PICKLING_CALLS]
    breaches += [(line, f"{name} pickles") for line, name in _imports(tree) if name.split(".")[0] in _PICKLERS]
    breaches += [
        (node.lineno, "allow_pickle must be False")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "allow_pickle"
        and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False)
    ]
    return sorted(set(breaches))


def swallowed_errors(text: str) -> list[Breach]:
    """Handlers that catch everything and do nothing about it."""
    tree = ast.parse(text)
    handlers = [node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)]
    breaches = [
        (handler.lineno, "a broad except that does nothing hides the fault")
        for handler in handlers
        if _is_broad(handler.type) and all(_does_nothing(statement) for statement in handler.body)
    ]
    breaches += [
        (node.lineno, "suppressing every exception hides the fault")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("suppress", "contextlib.suppress")
        and any(_is_broad(argument) for argument in node.args)
    ]
    return breaches


def too_long(text: str) -> list[Breach]:
    """A file that has outgrown one reading."""
    lines = text.count("\n")
    return [(lines, f"{lines} lines; split it, the most is {LONGEST_FILE}")] if lines > LONGEST_FILE else []


def junk_drawer(path: Path) -> list[Breach]:
    """A module or folder named after nothing it holds."""
    parts = [*path.parts[:-1], path.stem]
    return [(1, f"`{part}` says nothing about what is inside") for part in parts if part.lower() in JUNK_DRAWERS]


def leaks(text: str) -> list[Breach]:
    """Traces of the machine a file was written on: its folders, the package index it used."""
    return [
        (number, f"`{found[0]}` exists on one machine only")
        for number, line in enumerate(text.splitlines(), start=1)
        for pattern in (_LOCAL_PATH, _REGISTRY)
        if (found := pattern.search(line))
    ]


def _imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Modules that are imported, with the names taken out of them as `module.name`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("__import__", "importlib.import_module"):
            yield from ((node.lineno, str(name.value)) for name in node.args[:1] if isinstance(name, ast.Constant))


def _names_used(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Dotted names as they are imported or reached, with aliases undone: `import torch as t; t.load` is torch.load."""
    meaning: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                meaning[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                meaning[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield node.lineno, f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root, _, rest = ast.unparse(node).partition(".")
            if root in meaning:
                yield node.lineno, f"{meaning[root]}.{rest}"


def _is_broad(caught: ast.expr | None) -> bool:
    if caught is None:
        return True
    kinds = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(ast.unparse(kind).removeprefix("builtins.") in _BROAD for kind in kinds)


def _does_nothing(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Pass | ast.Continue) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )
