"""The section of a page that shows a layout: degrees, mesh, pipeline."""

from html import escape

from danlu.cost.software import token_dispatch
from danlu.report import layout_svg
from danlu.spec import Cluster, Model, Plan, Recipe
from danlu.spec.plan import Axis
from danlu.spec.rank_placement import PlacementError

_AXES: dict[Axis, str] = {
    "pp": "pipeline parallel",
    "replicate": "replicas of the sharded model (HSDP)",
    "shard": "sharded states (FSDP)",
    "cp": "context parallel",
    "tp": "tensor parallel",
    "ep": "expert parallel",
}


def layout_section(plan: Plan, recipe: Recipe | None, cluster: Cluster | None) -> str:
    """Table of degrees and settings beside the pictures."""
    pictures = [f'<div class="card"><h3>Mesh</h3>{_mesh(plan, cluster)}</div>']
    if recipe and isinstance(recipe.model, Model):
        pictures.append(
            f'<div class="card"><h3>Layers</h3>{layout_svg.pipeline_svg(plan, recipe.model.layers)}'
            f'<p class="soft">{escape(_pipeline_words(plan, recipe.model))}</p></div>'
        )
    return (
        f'<div class="columns"><div class="card"><h3>Degrees</h3>{_degrees(plan)}</div>'
        f'<div class="stack">{"".join(pictures)}</div></div>'
    )


def _degrees(plan: Plan) -> str:
    rows = []
    for axis, meaning in _AXES.items():
        degree = getattr(plan.degrees, axis)
        where = ", ".join(f"{count} on {level}" for level, count in plan.mapping.get(axis, {}).items())
        rows.append(
            f'<tr class="{"one" if degree == 1 else "many"}"><td><code>{axis}</code></td>'
            f'<td class="number">{degree:,}</td><td>{meaning}'
            f"{f'<br><small>{escape(where)}</small>' if where else ''}</td></tr>"
        )
    settings = {
        "microbatches": f"{plan.microbatches:,}",
        "schedule": plan.pipeline.schedule if plan.degrees.pp > 1 else "none",
        "attention over cp": plan.context_parallel if plan.degrees.cp > 1 else "none",
        "recompute": str(plan.recompute),
        "compile": "every block" if plan.compile else "no",
        "tokens to experts": _token_dispatch(plan),
        "logits": f"in {plan.loss_chunks} parts" if plan.loss_chunks > 1 else "all at once",
        "inputs gathered by tp": "gathered again" if plan.regather_inputs else "kept",
        "parameters after forward": "freed (ZeRO-3)" if plan.resolved_reshard_after_forward else "kept (ZeRO-2)",
        "gradients reduced": "once per step" if plan.reduces_once_per_step else "after every microbatch",
        "optimizer's moments": "sharded over replicas too" if plan.shard_optimizer_over_replicas else "as parameters",
    }
    return (
        '<table><tr><th>axis</th><th class="number">ranks</th><th></th></tr>' + "".join(rows) + "</table>"
        '<table style="margin-top:10px">'
        + "".join(f"<tr><td class='soft'>{name}</td><td>{value}</td></tr>" for name, value in settings.items())
        + "</table>"
    )


def _token_dispatch(plan: Plan) -> str:
    """How tokens reach the experts of other ranks."""
    if plan.degrees.ep == 1:
        return "none are sent"
    return token_dispatch(plan).words


def _mesh(plan: Plan, cluster: Cluster | None) -> str:
    """The picture with its caption, or why there is none."""
    try:
        grid = layout_svg.rank_grid(plan, cluster)
    except PlacementError as error:
        return f'<p class="soft">No picture: {escape(str(error))}.</p>'
    degrees = plan.degrees
    words = f"{degrees.world:,} {'rank' if degrees.world == 1 else 'ranks'}: {grid.column_axes} across"
    if grid.ranks.shape[1] > 1:
        words += f", {grid.row_axes} down"
    if grid.ranks_per_node:
        words += f"; ranks of one tint share a node of {grid.ranks_per_node}"
    if degrees.ep > 1:
        words += f". Experts fold shard × cp × tp again, into {degrees.expert_shard} × ep {degrees.ep}"
    return f'{layout_svg.mesh_svg(grid)}<p class="soft">{escape(words)}.</p>'


def _pipeline_words(plan: Plan, model: Model) -> str:
    words = f"{model.layers} layers"
    if plan.num_stages > 1:
        words += f" in {plan.num_stages} stages on {plan.degrees.pp} pipeline ranks, schedule {plan.pipeline.schedule}"
    if model.moe:
        routed = model.layers - model.moe.dense_layers
        words += f"; {routed} of them route every token to {model.moe.top_k} of {model.moe.experts} experts"
    return words + "."
