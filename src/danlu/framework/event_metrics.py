"""The metrics of an event, under the names that TensorBoard, Weights & Biases and Prometheus show."""

from typing import Protocol

from danlu.spec.event import EvaluationEvent, Event, StepEvent


class MetricsSink(Protocol):
    """Something beside the run's own files that metrics go to. It must never end or delay training."""

    def add(self, event: Event) -> None:
        """Take an event of the run; called on rank 0 by the thread that trains."""
        ...

    def close(self) -> None:
        """The run has ended."""
        ...


def event_metrics(event: Event) -> tuple[int, dict[str, float]] | None:
    """The step of an event and its metrics by name; None for one without figures of a step."""
    if isinstance(event, EvaluationEvent):
        return event.step, {f"held-out loss/{name}": loss for name, loss in event.losses.items()}
    if not isinstance(event, StepEvent):
        return None
    metrics = {
        "loss": event.loss,
        "gradient norm": event.norm,
        "learning rate": event.learning_rate,
        "tokens per second": event.tokens / event.seconds,
        "memory": float(event.memory),
    }
    if event.imbalance is not None:
        metrics["expert imbalance"] = event.imbalance
    if event.all_to_all_seconds is not None:
        metrics["all-to-all share"] = event.all_to_all_seconds / event.seconds
    for level, sent in (event.traffic or {}).items():
        metrics[f"traffic/{level}"] = float(sent)
    if event.loss_scale is not None:
        metrics["loss scale"] = event.loss_scale
    if event.counted is not None:
        metrics["tokens counted"] = float(event.counted)
    for ahead, loss in enumerate(event.mtp_losses or (), start=2):
        metrics[f"mtp loss/{ahead} ahead"] = loss
    return event.step, metrics
