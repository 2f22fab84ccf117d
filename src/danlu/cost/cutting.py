"""A layout's cut of a model and a batch: who holds which layers, what a microbatch is, over whom states are split."""

from typing import TYPE_CHECKING

from danlu.cost.layer import Cut
from danlu.cost.layout import Layout
from danlu.cost.software import HYBRID, ZERO_3
from danlu.cost.stages import Held, Holding, held, holdings

if TYPE_CHECKING:
    from danlu.cost.step import Predictor


class Cutting:
    """What a layout makes of a model and a batch on one cluster: what every prediction of it starts from."""

    def __init__(self, predictor: "Predictor", layout: Layout) -> None:
        self.of, self.layout = predictor, layout
        self.shape, self.software = predictor.shape, predictor.software
        self.habits, self.network, self.device = predictor.habits, predictor.network, predictor.device
        self.sharding = self.software.sharding or (HYBRID if layout.replicate > 1 else ZERO_3)
        self.places = predictor.places(layout)
        splits = self.sharding.gradients != "none" and self.software.synchronises_every_microbatch
        self.deferred = splits and self.software.defers_in_pipeline and layout.pp > 1
        self.every = splits and not self.deferred
        self.cut = Cut(
            sequences=max(1, predictor.batch.sequences // (layout.data * layout.microbatches)),
            length=predictor.batch.length,
            tp=layout.tp,
            cp=layout.cp,
            ep=layout.ep,
            tp_span=self.places.tp,
            ep_span=self.places.ep,
            etp_span=self.places.expert_tp,
            cp_span=self.places.cp,
        )
        self.holdings = holdings(
            self.shape,
            layout.pp,
            layout.stages_per_rank,
            layout.stage_layers,
            slots=self.software.embedding_slots,
            zigzag=layout.schedule == "zbv",
        )

    def held(self, holding: Holding) -> Held:
        """Parameters of a rank before they are split over data-parallel ranks."""
        return held(self.shape, holding, self.layout.tp, self.layout.ep, self.software.expert_tp)
