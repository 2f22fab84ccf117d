"""The exposed share of traffic that overlaps with compute.

Traffic and compute run concurrently; the longer one sets the time. The kernels of the collective take cores and memory
bandwidth from the compute, which runs slower meanwhile (Wang et al., "Domino", 2024, and others measure 10 to 40 %):
`contention` of the hidden seconds is paid nevertheless.
"""


def exposed_time(traffic: float, compute: float, contention: float) -> float:
    """Seconds that `traffic` adds to `compute` which runs at the same time."""
    return max(0.0, traffic - compute) + contention * min(traffic, compute)
