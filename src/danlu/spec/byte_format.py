"""Human-readable sizes."""


def format_bytes(value: float) -> str:
    """Bytes in decimal units, as in data sheets, cluster files and disks: `34.1 GB`."""
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")):
        if value >= 1000**power:
            return f"{value / 1000**power:.1f} {unit}"
    return f"{value:.0f} B"
