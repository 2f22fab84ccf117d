"""The precision of a run as text: shown next to every speed, because it determines a chip's peak."""

from danlu.planner.precision import slow_precision
from danlu.planner.request import PlanRequest
from danlu.report import formatting
from danlu.spec import Cluster, Plan, Recipe, StartEvent


def describe_question(request: PlanRequest) -> str:
    """A plan request with precision and peak: the first line of every answer."""
    chips = f"{request.chips:,} of the {request.cluster.chips:,} chips of {request.cluster.name}"
    return f"{request.model.name} in {format_question_peak(request)}, on {chips}"


def format_question_peak(request: PlanRequest) -> str:
    """`bf16, peak 312 TFLOP/s a chip`."""
    return f"{request.recipe.precision.label}, peak {formatting.flop_rate(request.peak)} a chip"


def format_run_precision(start: StartEvent | None, recipe: Recipe | None) -> str:
    """The precision of a run: from its start event, or from its recipe for older versions; empty if neither has it."""
    if start and start.dtype and (recipe is None or recipe.precision.peak_dtype((start.dtype,)) != start.dtype):
        return start.dtype
    return recipe.precision.label if recipe else ""


def format_start_peak(start: StartEvent) -> str:
    """The reference peak of MFU: its precision, its source, and the spread of its measurements."""
    peak = f"{formatting.flop_rate(start.peak)}{f' in {start.dtype}' if start.dtype else ''}, {start.peak_source}"
    return peak if start.peak_spread is None else f"{peak} (measurements {formatting.percent(start.peak_spread)} apart)"


def slow_precision_note(recipe: Recipe, plan: Plan, cluster: Cluster | None) -> str:
    """What a slow precision costs a run, and the line of its recipe that changes it.

    Empty if little or nothing is lost, or no cluster is given.
    """
    if cluster and recipe.precision.quantizes and "fp8" not in cluster.chip.peak:
        return (
            f"{recipe.precision.label}: the chip has no fp8 peak, so quantized products are emulated, which is slower "
            'than without them; [precision] matmul = "none", or state `fp8` in the cluster\'s [chip.peak]'
        )
    slow = slow_precision(recipe, plan, cluster) if cluster else None
    if slow is None:
        return ""
    now, then = formatting.flop_rate(slow.peak), formatting.flop_rate(slow.faster_peak)
    number, unit = now.split(" ", 1)
    peaks = f"{number if then.endswith(unit) else now} of {then}"
    gain = f"is predicted {slow.speedup:.1f}× faster" if slow.speedup else "may be that much faster"
    return f'{slow.dtype}: {peaks} a chip; the same layout with [precision] compute = "{slow.faster}" {gain}'
