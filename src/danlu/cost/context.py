"""What every prediction of one model on one cluster starts from, beside the layout."""

from dataclasses import dataclass, replace

from danlu.cost.calibration import Calibration, ChipEfficiency, Overheads, load_calibration
from danlu.cost.collectives import Network, build_network
from danlu.cost.operator_time import DeviceModel, build_device
from danlu.cost.software import Software
from danlu.ops.model_shape import ModelShape, model_shape
from danlu.spec.cluster import Cluster
from danlu.spec.model import Model
from danlu.spec.recipe import BatchConfig


@dataclass(frozen=True, kw_only=True)
class CostContext:
    """A model, a batch, a chip, a network and the traits of the software."""

    shape: ModelShape
    batch: BatchConfig
    software: Software
    overheads: Overheads
    efficiency: ChipEfficiency
    device: DeviceModel
    muon_device: DeviceModel
    """The same chip in the precision of Muon's iterations."""
    network: Network
    solo_speedup: float
    """How much faster a rank runs while those it shares cores with wait."""
    spread: float
    """Standard deviation of the chips' speed."""
    assumptions: tuple[str, ...]


def cost_context(
    model: Model, batch: BatchConfig, cluster: Cluster, software: Software, dtype: str, constants: Calibration | None
) -> CostContext:
    """The context of one model and batch on one cluster; with the package's own constants unless given others."""
    constants, chip = constants or load_calibration(), cluster.chip
    overheads = constants.overheads
    efficiency = constants.efficiency_of(chip, software.attention == "native")
    if not chip.overlaps:
        software = replace(software, overlap_grad_reduce=False, overlap_p2p_comm=False, overlap_ring=False)
    return CostContext(
        shape=model_shape(model),
        batch=batch,
        software=software,
        overheads=overheads,
        efficiency=efficiency,
        device=build_device(chip, dtype, efficiency),
        muon_device=build_device(chip, software.muon.dtype if software.muon else dtype, efficiency),
        network=build_network(
            cluster,
            efficiency.intra_node,
            efficiency.inter_node,
            overheads.collective_latency,
            software.ring_bandwidth,
        ),
        solo_speedup=chip.alone,
        spread=overheads.spread if chip.spread is None else chip.spread,
        assumptions=constants.assumptions(chip, dtype),
    )
