"""Forward passes through the stages of a pipeline, without a backward: for evaluation.

The schedules of torch are made for training: one step of theirs moves gradients too, and switching to their `eval` and
back sets their stages up anew.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from danlu.parallel.batch import Batch
from danlu.spec.plan import Plan


class StageForward(NamedTuple):
    """One microbatch through one stage."""

    stage: int
    microbatch: int


def forward_turns(stage_ranks: Sequence[int], microbatches: int) -> list[dict[int, StageForward]]:
    """What every rank computes in each turn, for any placement of stages; results are sent at the end of their turn.

    Microbatches go round in groups as large as the number of ranks, so that ranks with several stages are busy too.
    """
    ranks = max(stage_ranks) + 1
    ready: list[set[StageForward]] = [set() for _ in range(ranks)]
    ready[stage_ranks[0]] = {StageForward(0, microbatch) for microbatch in range(microbatches)}
    turns: list[dict[int, StageForward]] = []
    while any(ready):
        turn = {
            rank: min(waiting, key=lambda item: (item.microbatch // ranks, item.stage, item.microbatch))
            for rank, waiting in enumerate(ready)
            if waiting
        }
        for rank, item in turn.items():
            ready[rank].remove(item)
            if item.stage + 1 < len(stage_ranks):
                ready[stage_ranks[item.stage + 1]].add(StageForward(item.stage + 1, item.microbatch))
        turns.append(turn)
    return turns


class ForwardPipeline:
    """Passes microbatches through this rank's stages; every rank of the pipeline calls it together."""

    def __init__(
        self,
        plan: Plan,
        stage_modules: Sequence[nn.Module],
        stages: Sequence[int],
        stage_io_meta: Callable[[int], tuple[Tensor, Tensor]],
        device: torch.device,
        group: ProcessGroup,
    ) -> None:
        """`stage_io_meta(stage)` gives meta tensors of a stage's input and output, for one microbatch."""
        self.stage_ranks = [plan.rank_of_stage(stage) for stage in range(plan.num_stages)]
        self.stage_modules = dict(zip(stages, stage_modules, strict=True))
        self.stage_io_meta, self.device, self.group = stage_io_meta, device, group

    @torch.no_grad()
    def __call__(self, microbatches: Sequence[Batch], read_logits: Callable[[Tensor, int], Tensor]) -> list[Tensor]:
        """What is read of every microbatch's logits, by its number; nothing on ranks without the last stage.

        The modules are in the mode the caller chose; parameters may stay gathered.
        """
        inputs = {StageForward(0, number): each.tokens for number, each in enumerate(microbatches)}
        found: list[Tensor] = []
        for turn in forward_turns(self.stage_ranks, len(microbatches)):
            outputs: dict[StageForward, Tensor] = {}
            mine = turn.get(self.group.rank())
            if mine is not None:
                given = microbatches[mine.microbatch].model_inputs
                output = self.stage_modules[mine.stage](inputs.pop(mine), **given)
                if mine.stage == len(self.stage_ranks) - 1:
                    found.append(read_logits(output, mine.microbatch))
                else:
                    outputs[mine] = output
            self._exchange(turn, outputs, inputs)
        return found

    def _exchange(
        self, turn: dict[int, StageForward], outputs: dict[StageForward, Tensor], inputs: dict[StageForward, Tensor]
    ) -> None:
        """Send this turn's outputs to the ranks of the next stages, and receive what other ranks computed."""
        transfers: list[dist.P2POp] = []
        me = self.group.rank()
        for sender, item in turn.items():
            if item.stage == len(self.stage_ranks) - 1:
                continue
            following, receiver = StageForward(item.stage + 1, item.microbatch), self.stage_ranks[item.stage + 1]
            if sender == me == receiver:
                inputs[following] = outputs[item]
            elif sender == me:
                transfers.append(
                    dist.P2POp(dist.isend, outputs[item].contiguous(), group=self.group, group_peer=receiver)
                )
            elif receiver == me:
                inputs[following] = torch.empty_like(self.stage_io_meta(following.stage)[0], device=self.device)
                inputs[following].requires_grad_(False)
                transfers.append(dist.P2POp(dist.irecv, inputs[following], group=self.group, group_peer=sender))
        for work in dist.batch_isend_irecv(transfers) if transfers else ():
            work.wait()
