"""`danlu profile`: where the time of real steps goes, on ranks of their own beside a run or for a recipe."""

import json
from dataclasses import dataclass
from pathlib import Path

from danlu.cost import StepPrediction
from danlu.profiler.comparison import predict_step
from danlu.profiler.timeline import merge_timelines
from danlu.report.terminal import Console
from danlu.runs.dataset import ensure_dataset
from danlu.runs.prepare import check_run, check_weights, choose_world_size
from danlu.runs.scratch_run import recipe_beside_run, scratch_run
from danlu.spec import Plan, RunFolder, SpecError, load_plan
from danlu.spec.load import ParsedSpec
from danlu.spec.problem import problem_at
from danlu.spec.profile import ProfileRequest, RankProfile
from danlu.version import __version__

WARMUP_STEPS = 3
"""Steps before anything is timed: the first ones allocate, connect and compile."""


@dataclass(frozen=True)
class ProfileResult:
    """The profiled ranks, and what was predicted for them."""

    name: str
    plan: Plan
    cluster: str | None
    """Name of the cluster that the prediction is for; None if nothing was predicted."""
    profiles: tuple[RankProfile, ...]
    prediction: StepPrediction | None

    def trace(self) -> dict[str, object]:
        """The timeline of all profiled ranks in the Chrome trace format."""
        degrees = {axis: degree for axis, degree in self.plan.degrees.model_dump().items() if degree > 1}
        return merge_timelines(self.profiles, {"run": self.name, "layout": degrees, "by": f"danlu {__version__}"})

    def write_trace(self, path: Path) -> int:
        """Write the trace; returns its size in bytes."""
        return path.write_text(json.dumps(self.trace(), separators=(",", ":")), encoding="utf-8")


def profile(
    what: RunFolder | Path,
    *,
    steps: int = 3,
    ranks: tuple[int, ...] = (),
    plan: Path | None = None,
    cluster: str | None = None,
    nproc: int | None = None,
    warmup: int = WARMUP_STEPS,
    console: Console | None = None,
) -> ProfileResult:
    """Profile steps of a run, or of a recipe's file, on local ranks; all of them if `ranks` is empty.

    A run is only read, and may be training: the steps begin at its newest checkpoint, with its plan and cluster unless
    others are given, and nothing of them is kept.
    """
    console = console or Console(quiet=True)
    run = what if isinstance(what, RunFolder) else None
    if run is not None:
        if plan is None and nproc in (None, load_plan(run.plan).degrees.world):
            plan = run.plan
        if cluster is None and run.cluster.exists():
            cluster = str(run.cluster)
    world = choose_world_size(nproc, plan)
    for rank in ranks:
        if rank >= world:
            message = f"has {rank}, but there are {world} ranks"
            raise SpecError([problem_at(Path("danlu profile"), 1, "--ranks", message, f"0 to {world - 1}")])
    spec = check_run(recipe_beside_run(run) if run else what, plan, cluster, world)  # type: ignore[arg-type]
    prediction = predict_step(spec.recipe, spec.plan, spec.cluster)  # before ranks start: it may refuse
    parsed = ParsedSpec(spec.recipe, spec.recipe_document)
    check_weights(parsed)
    ensure_dataset(parsed, console)
    request = ProfileRequest(steps=steps, warmup=warmup, ranks=tuple(sorted(set(ranks))) or tuple(range(world)))
    with scratch_run(spec, run, console, ("--profile", request.model_dump_json())) as scratch:
        profiles = tuple(
            RankProfile.model_validate_json(scratch.rank_profile(rank).read_text()) for rank in request.ranks
        )
    return ProfileResult(
        run.name if run else spec.recipe.name,
        spec.plan,
        spec.cluster.name if spec.cluster and prediction else None,
        profiles,
        prediction,
    )
