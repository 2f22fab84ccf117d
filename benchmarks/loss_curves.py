"""Curves of losses over steps: thinned for a report, and drawn."""

POINTS = 100
"""Points of a curve in the report, each the mean of as many steps as make that many."""


def mean(values: list[float]) -> float:
    """The mean of losses."""
    return sum(values) / len(values)


def thinned(losses: list[float]) -> list[float]:
    """Means of consecutive steps, at most `POINTS` of them."""
    each = -(-len(losses) // POINTS)
    return [round(mean(losses[at : at + each]), 5) for at in range(0, len(losses), each)]


def draw(curves: dict[str, list[float]], steps: int, colors: dict[str, str]) -> str:
    """The curves as a picture, an SVG."""
    width, height, left, bottom = 760, 360, 50, 40
    low, high = (pick(value for curve in curves.values() for value in curve) for pick in (min, max))
    points = max(len(curve) for curve in curves.values())

    def x(index: float) -> float:
        return left + (width - left - 90) * index / max(1, points - 1)

    def y(loss: float) -> float:
        return 15 + (height - 15 - bottom) * (high - loss) / (high - low)

    parts = [f'<rect width="{width}" height="{height}" fill="white"/>']
    for number in range(int(low), int(high) + 1):
        if low <= number <= high:
            parts.append(f'<path d="M{left},{y(number):.1f}H{x(points - 1):.1f}" stroke="#ddd"/>')
            parts.append(f'<text x="{left - 8}" y="{y(number) + 4:.1f}" text-anchor="end">{number}</text>')
    for quarter in range(5):
        at = x((points - 1) * quarter / 4)
        parts.append(f'<text x="{at:.1f}" y="{height - 18}" text-anchor="middle">{steps * quarter // 4:,}</text>')
    for row, (name, curve) in enumerate(curves.items()):
        path = " ".join(f"{x(index):.1f},{y(loss):.1f}" for index, loss in enumerate(curve))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colors[name]}" stroke-width="1.5"/>')
        parts.append(f'<text x="{width - 80}" y="{30 + 18 * row}" fill="{colors[name]}">{name}</text>')
    parts.append(f'<text x="{x((points - 1) / 2):.1f}" y="{height - 3}" text-anchor="middle">step</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="13" role="img" aria-label="training loss over {steps:,} steps">{"".join(parts)}</svg>\n'
    )
