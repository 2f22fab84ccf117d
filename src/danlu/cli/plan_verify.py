"""`danlu plan --verify`: the best layouts run dry, formula beside program."""

from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from danlu.cli.plan_questions import Asked, write_text
from danlu.comm.layout import dense_ranks
from danlu.planner.search import Choice
from danlu.planner.verify import Verified, places_to_run, proposed, verified
from danlu.report.plan_tables import degrees_text, planned
from danlu.report.verify_tables import verified_json, verified_view
from danlu.spec import toml


def verify_best(asked: Asked, number: int, out: Path | None) -> None:
    """Run the best layouts dry, and propose the fastest that its own program does not refuse."""
    answer = asked.search(shown=number)
    found = _run_all(answer.best)
    chosen, kept = proposed(found), asked.kept()
    asked.show(verified_view(found, chosen), verified_json(found, chosen, kept))
    if chosen is None:
        raise typer.Exit(1)
    if out is not None:
        write_text(out, toml.dumps(planned(chosen.choice, kept)))


def _run_all(choices: tuple[Choice, ...]) -> list[Verified]:
    """Dry-run every layout, with a bar over its ranks on the standard error output."""
    from danlu.framework.dryrun import dry_runs

    runs = [(choice, _ranks(choice)) for choice in choices]
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("ranks"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    found: list[Verified] = []
    with bar:
        task = bar.add_task("dry run", total=sum(len(ranks) for _, ranks in runs))
        for number, (choice, ranks) in enumerate(runs, start=1):
            bar.update(task, description=f"{number} of {len(runs)}: {degrees_text(choice)}")
            question = choice.question

            def tell(rank: int, first: int = ranks[0]) -> None:
                if rank != first:
                    bar.advance(task)

            run = dry_runs(question.recipe, choice.plan, question.cluster, ranks, tell=tell)
            bar.advance(task)
            found.append(verified(choice, run))
    return found


def _ranks(choice: Choice) -> list[int]:
    """The first rank of every place on the pipeline that tells."""
    first_of = dense_ranks(choice.plan, choice.question.cluster)[:, 0, 0, 0, 0].tolist()
    return [first_of[place] for place in places_to_run(choice)]
