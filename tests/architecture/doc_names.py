"""What pages name in code (spans, blocks, tables) and does not exist: commands, options, paths, Python names, keys.

Every check returns a list of `(line, what)`, as the house rules do.
"""

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import typer
from house_rules import Breach
from source_tree import PACKAGE, ROOT, tracked_files

Code = tuple[int, str]

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^(?P=indent)```", re.M | re.S)
_SPAN = re.compile(r"(?<!`)`(?P<code>[^`]+?)`(?!`)")
_COMMAND = re.compile(r"(?<![\w./\"'-])danlu +(?P<rest>[a-zA-Z-].*)")
_SHELL_END = re.compile(r"\s(?:&&|\|\|?|>|#)(?:\s|$)|;|\)|'\s*$")
_TREE = ("src/", "tests/", "docs/", "benchmarks/", "recipes/", "examples/", ".ci/")
_PATH = re.compile(r"(?<![\w/.<>*-])\.?\w[\w.-]*(?:/[\w.-]+)+/?(?![\w/<>*…])")
_FILE = re.compile(r"[\w.-]+\.(?:py|c|css|js|csv)")
_DOTTED = re.compile(r"(?<![\w./-])danlu(?:\.\w+)+")
_IDENTIFIER = re.compile(r"(?P<name>[A-Za-z]\w*(?:\.\w+)*)(?:\(.*\))?")
_OTHER_TOOLS = {"--gpus-per-node", "--exclusive", "--cpus-per-task", "--logdir", "--strict", "--check"}
_READERS_OWN = {"mine.py", "danlu_mychip.py", "recipe.toml", "plan.toml", "cluster.toml"}


def fences(page: str) -> Iterator[tuple[int, str, str]]:
    """Line, language and text of every fenced block."""
    for found in _FENCE.finditer(page):
        yield page.count("\n", 0, found.start("body")) + 1, found["language"], found["body"]


def spans(page: str) -> Iterator[Code]:
    """Every `code span` outside of blocks, on one line."""
    prose = _FENCE.sub(lambda found: "\n" * found[0].count("\n"), page)
    for paragraph in re.finditer(r"(?:[^\n]+\n?)+", prose):
        for found in _SPAN.finditer(paragraph[0]):
            line = prose.count("\n", 0, paragraph.start() + found.start()) + 1
            yield line, " ".join(found["code"].split())


def code(page: str) -> Iterator[Code]:
    """Every span, and every line of a block, fenced or indented; a continued line in one piece."""
    yield from spans(page)
    for line, _, body in fences(page):
        yield from ((line + body.count("\n", 0, found.start()), found[0]) for found in _lines(body))
    prose = _FENCE.sub(lambda found: "\n" * found[0].count("\n"), page)
    yield from ((prose.count("\n", 0, found.start()) + 1, found[0]) for found in re.finditer(r"(?m)^ {4,}\S.*", prose))


def _lines(body: str) -> Iterator[re.Match[str]]:
    return re.finditer(r"(?:[^\n]*\\\n)*[^\n]+", body)


# ---- commands and options


@cache
def program() -> Any:
    """The commands as they are registered: a group of click's, which typer may bring itself."""
    from danlu.cli.app import app

    return typer.main.get_command(app)


def commands(group: Any = None, above: str = "") -> dict[str, Any]:
    """Every command a user sees, by its words."""
    found = {}
    for name, command in (group or program()).commands.items():
        if hasattr(command, "commands"):
            found |= commands(command, f"{above}{name} ")
        elif not command.hidden:
            found[above + name] = command
    return found


def unknown_commands(page: str) -> list[Breach]:
    """`danlu …` with a command or an option that does not exist."""
    return [
        (line, problem)
        for line, text in code(page)
        for part in _SHELL_END.split(text.replace("\\\n", " "))
        if (found := _COMMAND.search(part)) and (problem := _command_problem(found["rest"].split()))
    ]


def _command_problem(words: list[str]) -> str:
    at, said = program(), "danlu"
    while hasattr(at, "commands") and words and not words[0].startswith("-"):
        word = words.pop(0).strip("…,.:`'")
        if not word or word.isupper():  # a placeholder: COMMAND, …
            return ""
        if word not in at.commands or _is_renamed(at.commands[word]):
            return f"there is no command `{said} {word}`"
        said, at = f"{said} {word}", at.commands[word]
    takes_value = {name: not getattr(option, "is_flag", False) for option in at.params for name in option.opts}
    known = {name for option in at.params for name in [*option.opts, *option.secondary_opts]} | {"--help"}
    while words:
        name, equals, _ = words.pop(0).strip("[],.:…`").partition("=")
        if name.startswith("-") and name.strip("-"):
            if name not in known:
                return f"`{said}` has no option {name}"
            if takes_value.get(name) and not equals and words:
                words.pop(0)
    return ""


def _is_renamed(command: Any) -> bool:
    return command.hidden and bool(command.context_settings.get("ignore_unknown_options"))


def unknown_options(page: str) -> list[Breach]:
    """A span that is an option (`--json`, `--out FILE`) of no command, benchmark, test or documentation script."""
    return [
        (line, f"no command has the option {name}")
        for line, text in spans(page)
        for name in re.findall(r"^--[\w-]+", text)
        if name not in _known_options()
    ]


@cache
def _known_options() -> set[str]:
    ours = {name for command in commands().values() for option in command.params for name in _names(option)}
    scripts = [path for path in tracked_files(new=True) if path.suffix == ".py" and path.parts[0] != "src"]
    theirs = {name for path in scripts for name in re.findall(r'"(--[\w-]+)"', (ROOT / path).read_text("utf-8"))}
    return ours | theirs | _OTHER_TOOLS | {"--help", "--version"}


def _names(option: Any) -> list[str]:
    return [*option.opts, *option.secondary_opts]


def commands_in_table(page: str) -> set[str]:
    """Commands in the first column of a table; "`danlu data build`, `show`" are `data build` and `data show`."""
    found = set()
    for row in re.findall(r"(?m)^\| (`danlu .+?) \|", page):
        group: list[str] = []
        for text in re.findall("`([^`]+)`", row):
            words = list(takewhile(lambda word: word.islower() and word.isalpha(), text.split()))
            if words[0] == "danlu":
                group, words = words[1:-1], words[-1:]
            found.add(" ".join([*group, *words]))
    return found


# ---- files


def missing_paths(page: str, folder: Path) -> list[Breach]:
    """Paths into this repository, and names of source files, that are not there."""
    places = [ROOT, PACKAGE, PACKAGE.parent, folder]
    breaches = [
        (line, f"there is no {path}")
        for line, text in code(page)
        for path in _PATH.findall(re.sub(r"\w+://\S+|danlu-\S+", "", text))
        if path.startswith(_TREE) or path.endswith((".py", ".c"))
        if not any((place / path).exists() for place in places)
    ]
    names = {path.name for path in tracked_files(new=True)} | _READERS_OWN
    breaches += [
        (line, f"there is no file {text}") for line, text in spans(page) if _FILE.fullmatch(text) and text not in names
    ]
    return sorted(set(breaches))


def file_table(page: str) -> list[Code]:
    """What the first columns of tables headed `file`, `module` or `subpackage` name, without `.py`."""
    found = []
    inside = False
    for number, line in enumerate(page.splitlines(), start=1):
        cells = line.split("|")
        if len(cells) < 3:
            inside = False
        elif cells[1].strip() in ("file", "module", "subpackage"):
            inside = True
        elif inside:
            found += [(number, name.removesuffix("/")) for name in re.findall("`([^`]+)`", cells[1])]
    return found


def file_table_breaches(readme: str, folder: Path) -> list[Breach]:
    """Files of a room's table that are not in its folder, and modules in its folder that the README does not name."""
    named = file_table(readme)
    breaches = [
        (line, f"there is no {name} here")
        for line, name in named
        if not name.startswith(".") and not (folder / name).exists() and not (folder / f"{name}.py").exists()
    ]
    said = {word for _, text in code(readme) for word in re.findall(r"\w+", text)}
    own = {path.stem for path in folder.glob("*.py")} - {"__init__", "__main__"}
    own |= {path.name for path in folder.iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    return breaches + [(1, f"{name} is not named") for name in sorted(own - said)]


# ---- Python names


def unknown_names(page: str) -> list[Breach]:
    """`danlu.a.b` and imports from danlu that lead nowhere; class and function names that stand nowhere in the code."""
    breaches = [
        (line, f"there is no {name}")
        for line, text in code(page)
        for name in _DOTTED.findall(text)
        if not resolves(name)
    ]
    for line, language, body in fences(page):
        if language == "python":
            imports = [node for node in ast.walk(ast.parse(body)) if isinstance(node, ast.ImportFrom) and node.module]
            breaches += [
                (line + node.lineno - 1, f"there is no {node.module}.{alias.name}")
                for node in imports
                if str(node.module).startswith("danlu.")
                for alias in node.names
                if not resolves(f"{node.module}.{alias.name}")
            ]
    shown = set(re.findall(r"\w+", " ".join(body for _, _, body in fences(page))))
    for line, text in spans(page):
        found = None if _FILE.fullmatch(text) else _IDENTIFIER.fullmatch(text)
        words = re.findall(r"\w+", found["name"]) if found else []
        breaches += [
            (line, f"`{word}` stands nowhere in the code")
            for word in words
            if (re.search("[a-z][A-Z]", word) or "_" in word.strip("_")) and word not in shown | _words_of_code()
        ]
    return breaches


def resolves(name: str) -> bool:
    """Whether a dotted name of danlu is a module or is bound in one, found without importing anything."""
    at, parts = PACKAGE, name.split(".")[1:]
    while parts and (at / parts[0]).is_dir():
        at /= parts.pop(0)
    is_module = bool(parts) and (at / f"{parts[0]}.py").is_file()
    module = at / (f"{parts.pop(0)}.py" if is_module else "__init__.py")
    if not parts:
        return module.is_file()
    return parts[0] in _bound(module)


@cache
def _bound(module: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


@cache
def _words_of_code() -> set[str]:
    suffixes = (".py", ".toml", ".csv", ".yml", ".json")
    files = [
        path for path in tracked_files(new=True) if path.suffix in suffixes and path.parts[1:2] != ("architecture",)
    ]
    return {word for path in files for word in re.findall(r"\w+", (ROOT / path).read_text("utf-8"))}


# ---- keys of recipe, plan and cluster

_KINDS = ("recipe", "plan", "cluster")
_OPEN = "*"
"""Any key may stand here: a mapping by level, a module's arguments."""


@cache
def keys() -> set[str]:
    """Every dotted key of the three files; lists of tables as their table."""
    from danlu.spec.schema import json_schema

    found: set[str] = set()
    for kind in _KINDS:
        schema = json_schema(kind)
        _collect(schema, schema, "", found)
    return found


def _collect(root: dict[str, Any], node: dict[str, Any], path: str, found: set[str]) -> None:
    for choice in [node, *node.get("anyOf", []), *node.get("oneOf", [])]:
        if "$ref" in choice:
            _collect(root, root["$defs"][choice["$ref"].rpartition("/")[2]], path, found)
        if "items" in choice:
            _collect(root, choice["items"], path, found)
        for key, value in choice.get("properties", {}).items():
            found.add(f"{path}{key}")
            _collect(root, value, f"{path}{key}.", found)
        if choice.get("additionalProperties"):
            found.add(f"{path}{_OPEN}")


def is_key(path: str) -> bool:
    """Whether a dotted path is a key of one of the files."""
    parts = path.split(".")
    above = [".".join([*parts[:depth], _OPEN]) for depth in range(1, len(parts))]
    return path in keys() or any(prefix in keys() for prefix in above)


def unknown_keys(page: str) -> list[Breach]:
    """Keys in TOML blocks, in `table.key` and in `key = value` spans that no recipe, plan or cluster has."""
    tables = {key.split(".")[0] for key in keys() if "." in key}
    last = {key.rpartition(".")[2] for key in keys()}
    breaches = []
    for line, text in spans(page):
        path, equals, value = text.partition(" = ")
        if re.fullmatch(r"[a-z]\w*(?:\.[a-z_]\w*)+", path) and path.split(".")[0] in tables and "(" not in value:
            breaches += (
                [] if is_key(path) or path.endswith((".py", ".toml", ".json", ".jsonl")) else [(line, f"no key {path}")]
            )
        elif equals and re.fullmatch(r"[a-z]\w*", path) and _is_toml(text) and path not in last:
            breaches.append((line, f"no key {path}"))
    for line, language, body in fences(page):
        if language == "toml":
            table = tomllib.loads(body.replace("…", ""))
            if not table.keys() & {"project", "build-system"}:
                breaches += [(line, f"no key {path}") for path in _flat(table) if not is_key(path)]
    return breaches


def _is_toml(text: str) -> bool:
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return False
    return True


def _flat(table: dict[str, Any], path: str = "") -> Iterable[str]:
    for key, value in table.items():
        inner = value if isinstance(value, list) else [value]
        tables = [item for item in inner if isinstance(item, dict)]
        yield f"{path}{key}"
        for item in tables:
            yield from _flat(item, f"{path}{key}.")
