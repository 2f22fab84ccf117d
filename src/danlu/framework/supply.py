"""The training data of a run: what was appended is taken up at one sample by all ranks, and promised on disk first."""

from queue import SimpleQueue

import torch
import torch.distributed as dist

from danlu.comm.mesh import Mesh
from danlu.framework.feed import Feed
from danlu.spec.recipe import Recipe
from danlu.spec.run import RunFolder
from danlu.storage.taken_up import TakenUpLog
from danlu.storage.training_data import TrainingData, keep_promises


class Supply:
    """Opens a run's data and feeds this rank. All ranks make one, and call `take_up`, together."""

    def __init__(self, run: RunFolder, recipe: Recipe, mesh: Mesh, cursor: int) -> None:
        """`cursor` is the sample the run goes on from."""
        self._log, self._mesh = TakenUpLog(run.data), mesh
        self._warnings: SimpleQueue[str] = SimpleQueue()
        length, seed = recipe.batch.length, recipe.seed
        self.data = TrainingData.of(
            recipe.data, length, seed, check_sizes=mesh.rank == 0, on_warning=self._warnings.put
        )
        self.feed = Feed(self.data, recipe.batch, recipe.model.vocabulary, mesh)
        self.take_up(cursor)

    def warnings(self) -> list[str]:
        """What the user should know of the data and was not told yet."""
        found: list[str] = []
        while not self._warnings.empty():
            found.append(self._warnings.get())
        return found

    def take_up(self, cursor: int) -> None:
        """Read what was appended meanwhile from sample `cursor` on, which no rank has read yet.

        Rank 0 looks and tells the others, because another machine's view of a folder may lag behind.
        """
        taken = keep_promises(self._log, self.data, cursor) if self._mesh.rank == 0 else []
        count = torch.tensor(len(taken), device=self._mesh.device)
        dist.broadcast(count, src=0)
        shape = (int(count), 1 + len(self.data.sources))
        told = torch.tensor([[start, *editions] for start, editions in taken] or 0, device=self._mesh.device)
        told = told.expand(shape).contiguous()
        dist.broadcast(told, src=0)
        taken = [(start, tuple(editions)) for start, *editions in told.tolist()]
        if taken != self.data.taken:
            self.feed.forget()
            self.data.take_up(taken)
