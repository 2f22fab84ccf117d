"""`danlu plan --verify`: compares the best layouts with their dry runs."""

from pathlib import Path

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from danlu.cli.plan_modes import PlanContext, write_text
from danlu.comm.rank_layout import dense_ranks
from danlu.planner.pricing import PricedPlan
from danlu.planner.verify import LayoutVerification, first_accepted, pp_ranks_to_run, verify_layout
from danlu.report.plan_tables import degrees_text
from danlu.report.plan_verify_tables import verification_json, verification_view
from danlu.report.terminal import Console


def verify_best(context: PlanContext, number: int, out: Path | None) -> None:
    """Dry-run the best layouts, simplest of a tie first, and propose the first that is not rejected."""
    result = context.search(shown=number)
    found = _run_all(result.ranked[:number])
    chosen, goodput = first_accepted(found), context.goodput()
    context.show(verification_view(found, chosen), verification_json(found, chosen, goodput))
    if chosen is None:
        raise typer.Exit(1)
    if out is not None:
        write_text(out, context.plan_text(chosen.priced_plan, goodput))


def _run_all(plans: tuple[PricedPlan, ...]) -> list[LayoutVerification]:
    """Dry-run every layout, with a progress bar on stderr."""
    from danlu.dryrun.dry_run import dry_run_ranks

    runs = [(priced, _ranks(priced)) for priced in plans]
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("ranks"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    found: list[LayoutVerification] = []
    with bar:
        task = bar.add_task("dry run", total=sum(len(ranks) for _, ranks in runs))
        for number, (priced, ranks) in enumerate(runs, start=1):
            bar.update(task, description=f"{number} of {len(runs)}: {degrees_text(priced)}")
            request = priced.request

            def on_rank(rank: int, first: int = ranks[0]) -> None:
                if rank != first:
                    bar.advance(task)

            run = dry_run_ranks(request.recipe, priced.plan, request.cluster, ranks, on_rank=on_rank)
            bar.advance(task)
            found.append(verify_layout(priced, run))
    return found


def _ranks(priced: PricedPlan) -> list[int]:
    """The first rank of every pp rank to run."""
    first_of = dense_ranks(priced.plan, priced.request.cluster)[:, 0, 0, 0, 0].tolist()
    return [first_of[pp_rank] for pp_rank in pp_ranks_to_run(priced)]
