"""A run's metrics in Weights & Biases."""

import secrets
from collections.abc import Callable
from typing import Any

from danlu.framework.event_metrics import event_metrics
from danlu.spec.event import Event
from danlu.spec.recipe import Recipe
from danlu.spec.run_folder import RunFolder

INIT_TIMEOUT = 30.0
"""Seconds that the service may take to answer before the run goes on without it."""
_ID_FILE = "wandb-id"


class WandbWriter:
    """Passes metrics on; whatever fails there is a warning, once, and training goes on without it."""

    def __init__(self, run: RunFolder, recipe: Recipe, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._run: Any = None
        try:
            self._run = _start(run, recipe)
        except Exception as error:
            self._give_up("could not be started", error)

    def add(self, event: Event) -> None:
        """Log the metrics of an event, if it has any."""
        if self._run is None or (found := event_metrics(event)) is None:
            return
        step, metrics = found
        try:
            # The step is a metric of its own: W&B's counter refuses the steps that a resumed run repeats.
            self._run.log({"step": step, **metrics})
        except Exception as error:
            self._give_up("does not take metrics any more", error)

    def close(self) -> None:
        """Send what waits, and end the run there."""
        if self._run is not None:
            try:
                self._run.finish()
            except Exception as error:
                self._give_up("could not be closed", error)

    def _give_up(self, what: str, error: Exception) -> None:
        self._run = None
        remedy = "`pip install 'danlu[wandb]'`" if isinstance(error, ImportError) else '`wandb_mode = "offline"`'
        reason = " ".join(str(error).split())[:500] or type(error).__name__
        self._warn(
            f"Weights & Biases {what}: {reason}; metrics are complete in events.jsonl and TensorBoard; "
            f"remedy: {remedy}, or remove `metrics.wandb`"
        )


def _start(run: RunFolder, recipe: Recipe) -> Any:
    import wandb  # two seconds, and only for who asks for it

    started = wandb.init(
        project=recipe.metrics.wandb,
        name=run.name,
        id=_run_id(run),
        resume="allow",
        dir=str(run.path),
        mode=recipe.metrics.wandb_mode,
        config=recipe.model_dump(mode="json", exclude_defaults=True),
        settings=wandb.Settings(silent=True, console="off", init_timeout=INIT_TIMEOUT, x_disable_stats=True),
    )
    started.define_metric("*", step_metric="step")
    return started


def _run_id(run: RunFolder) -> str:
    """The id of this run there, made at its first start, so that a resumed run continues the same curves."""
    file = run.path / _ID_FILE
    if not file.exists():
        file.write_text(f"{secrets.token_hex(8)}\n")
    return file.read_text().strip()
