"""Rejects options that have no effect together: one table for all commands, checked before the command runs."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import typer
from typer.core import TyperCommand

from danlu.cli.renamed import renamed_option


@dataclass(frozen=True)
class MutuallyExclusive:
    """Options of which only one may be given."""

    options: tuple[str, ...]
    why: str

    def problems(self, given: set[str]) -> Iterator[str]:
        """Both options, and why they do not go together."""
        found = [option for option in self.options if option in given]
        if len(found) > 1:
            yield f"{found[0]} and {found[1]} do not go together: {self.why}"


@dataclass(frozen=True)
class NoEffectWith:
    """Options that have no effect beside another one."""

    option: str
    ignored: tuple[str, ...]
    why: str

    def problems(self, given: set[str]) -> Iterator[str]:
        """Both options, and why they do not go together."""
        found = [other for other in self.ignored if other in given]
        if self.option in given and found:
            yield f"{found[0]} has no effect with {self.option}: {self.why}"


@dataclass(frozen=True)
class Requires:
    """Options that do nothing unless another one is given."""

    options: tuple[str, ...]
    needed: str
    why: str

    def problems(self, given: set[str]) -> Iterator[str]:
        """Both options, and why the second is needed."""
        found = [option for option in self.options if option in given]
        if found and self.needed not in given:
            yield f"{found[0]} has no effect without {self.needed}: {self.why}"


OptionRule = MutuallyExclusive | NoEffectWith | Requires
_MODES = ("--why-not", "--what-if", "--compare", "--days", "--max-length", "--min-memory", "--verify")
_S3 = "an s3:// address"
_SLURM = ("--ranks-per-node", "--spares", "--partition", "--account", "--time", "--sbatch", "--wait")
_PLAN: tuple[OptionRule, ...] = (
    MutuallyExclusive(_MODES, "each is a separate mode; use one at a time"),
    Requires(("--tokens",), "--days", "it is the number of tokens to train within those days; add --days, or omit it"),
    *(
        NoEffectWith(
            mode, ("--output", "--html", "--open"), f"its result is a comparison, not one plan; omit it, or {mode}"
        )
        for mode in _MODES[:-1]
    ),
    NoEffectWith("--verify", ("--html", "--open"), "it prints tables; omit --verify for the page"),
    NoEffectWith("--compare", ("--chips",), "the given plan says how many ranks it has; omit --chips"),
)
_HF: tuple[OptionRule, ...] = (NoEffectWith("--no-compare", ("--tolerance",), "nothing is compared"),)
OPTION_RULES: dict[str, tuple[OptionRule, ...]] = {
    "plan": _PLAN,
    "train": (
        NoEffectWith("--resume", ("--name",), "a resumed run keeps its name"),
        NoEffectWith("--resume", ("--set",), "a resumed run keeps its recipe; edit recipe.toml in its folder"),
    ),
    "resume": (
        MutuallyExclusive(("--nodes", "--nproc"), "--nproc is for this machine; with --nodes give --ranks-per-node"),
        Requires(_SLURM, "--nodes", "it is for a resume through Slurm"),
    ),
    "launch": (NoEffectWith("--dry-run", ("--wait",), "nothing is submitted, so there is nothing to wait for"),),
    "show": (NoEffectWith("--json", ("--open",), "with JSON no page is opened"),),
    "compare": (
        Requires(("--open",), "--html", "it opens the page that is written there"),
        NoEffectWith("--json", ("--by",), "JSON has no chart"),
    ),
    "probe": (
        Requires(
            ("--rdzv-endpoint", "--store-token", "--levels"),
            "--rank",
            "they are for ranks that are started separately on every host",
        ),
        Requires(("--rank",), "--ranks", "the number of all ranks"),
        Requires(("--rank",), "--rdzv-endpoint", "host:port for the rendezvous"),
        Requires(("--rank",), "--levels", "the network from inside out, such as node:8,fabric:4"),
    ),
    "comm tune": (
        Requires(("--rdzv-endpoint", "--store-token"), "--rank", "they are for ranks that are started separately"),
        Requires(("--rank",), "--rdzv-endpoint", "host:port for the rendezvous"),
    ),
    "data locate": (
        Requires(("--plan",), "--rank", "a layout says what a rank reads; the batch is the same for all"),
        MutuallyExclusive(("--step", "--sample"), "each names a batch; give one"),
    ),
    "import hf": _HF,
    "export hf": _HF,
    **{
        command: (Requires(("--s3",), _S3, "a run's recipe has the settings of its store"),)
        for command in (
            *(f"ckpt {name}" for name in ("ls", "verify", "repair", "show", "rm", "copy", "diff")),
            *(f"import {kind}" for kind in ("dcp", "megatron", "safetensors")),
        )
    },
}
"""Rules by the name of the command."""


class OptionCheckingCommand(TyperCommand):
    """A command whose options are checked against each other before it runs."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Exit with code 2 at the old name of an option, with the new one."""
        if message := renamed_option(args, {name for parameter in self.params for name in parameter.opts}):
            typer.echo(message, err=True)
            raise typer.Exit(2)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Exit with code 2 if an option has no effect, naming both options; else run the command."""
        given = set(_given(ctx))
        for problem in (words for rule in OPTION_RULES.get(_name(ctx), ()) for words in rule.problems(given)):
            typer.echo(problem, err=True)
            raise typer.Exit(2)
        return super().invoke(ctx)


def _name(ctx: Any) -> str:
    """The key of the command in `OPTION_RULES`, for `danlu` and `python -m danlu` alike."""
    above = ctx.parent
    return f"{_name(above)} {ctx.info_name}".strip() if above is not None else ""


def _given(ctx: Any) -> Iterable[str]:
    """Options given on the command line."""
    for parameter in ctx.command.params:
        source = ctx.get_parameter_source(parameter.name)
        if source is not None and source.name == "COMMANDLINE":  # by name: typer vendors its own click
            is_off = ctx.params.get(parameter.name) is False and parameter.secondary_opts
            yield max(parameter.secondary_opts if is_off else parameter.opts, key=len)
    if any(isinstance(value, str) and value.startswith("s3://") for value in ctx.params.values()):
        yield _S3


def apply_option_rules(app: typer.Typer) -> None:
    """Make every command of an app, and of its sub-apps, reject options that have no effect together."""
    for command in app.registered_commands:
        if not issubclass(command.cls or TyperCommand, OptionCheckingCommand):
            command.cls = OptionCheckingCommand
    for group in app.registered_groups:
        if group.typer_instance is not None:
            apply_option_rules(group.typer_instance)
