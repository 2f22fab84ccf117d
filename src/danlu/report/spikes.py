"""Spikes of a run as text, in a line, a summary and the page."""

from collections.abc import Sequence
from html import escape

from danlu.report import formatting
from danlu.report.checkpoints import format_short_duration
from danlu.spec import SpikeEvent


def format_spike(event: SpikeEvent) -> str:
    """A spike in one line: what was seen, what was expected, what was done and what it cost."""
    return f"at step {event.step:,}: {format_finding(event)}; {format_action(event)}"


def format_finding(event: SpikeEvent) -> str:
    """What was seen and what was expected: `loss 7.913, expected 2.81 and at most 3.2`."""
    name = "gradient norm" if event.metric == "norm" else "loss"
    expected = f"expected {formatting.number(event.expected)} and at most {formatting.number(event.limit)}"
    return f"{name} {event.value:.4g}, {expected}"


def format_action(event: SpikeEvent) -> str:
    """What was done, and what it cost."""
    note = f" ({event.note})" if event.note else ""
    if event.action == "warned":
        return f"the update was applied{note}"
    if event.rewound_to is None:
        return f"the batch was skipped{note}: {event.lost_samples:,} samples, {_duration(event)}"
    cost = f"{event.lost_steps:,} step{'s' * (event.lost_steps != 1)}, {event.lost_samples:,} samples"
    return f"rewound to step {event.rewound_to:,}{note}: {cost} and {_duration(event)} lost"


def format_spike_totals(spikes: Sequence[SpikeEvent]) -> str:
    """All spikes in one line: `3: 1 skipped, 2 rewound; 12 steps, 96 samples and 4 s lost`."""
    counts = {action: sum(spike.action == action for spike in spikes) for action in ("warned", "skipped", "rewound")}
    text = f"{len(spikes):,}: " + ", ".join(f"{count:,} {action}" for action, count in counts.items() if count)
    if not (steps := sum(spike.lost_steps for spike in spikes)):
        return text
    samples, seconds = sum(spike.lost_samples for spike in spikes), sum(spike.lost_seconds for spike in spikes)
    return f"{text}; {steps:,} steps, {samples:,} samples and {format_short_duration(seconds)} lost"


def spikes_card(spikes: Sequence[SpikeEvent]) -> str:
    """The page's table of spikes."""
    if not spikes:
        return ""
    rows = "".join(
        f'<tr><td class="number">{spike.step:,}</td><td>{escape(format_finding(spike))}</td>'
        f'<td class="number">{spike.first_sample:,}</td><td class="wide">{escape(format_action(spike))}</td></tr>'
        for spike in spikes
    )
    return (
        f'<details class="card"><summary>Spikes<small>{escape(format_spike_totals(spikes))}</small></summary>'
        '<table><tr><th class="number">step</th><th>found</th><th class="number">first sample</th><th>done</th></tr>'
        f"{rows}</table></details>"
    )


def _duration(event: SpikeEvent) -> str:
    return format_short_duration(event.lost_seconds)
