"""The training data of a run: all ranks switch to a new version at the same sample, which is logged first."""

from queue import SimpleQueue

import torch

from danlu.comm.mesh import ParallelMesh
from danlu.framework.batch_loader import BatchLoader
from danlu.parallel.batch import Batch
from danlu.spec.recipe import Recipe
from danlu.spec.run_folder import RunFolder
from danlu.storage.data.mixture_dataset import MixtureDataset, VersionSwitch, update_version_log
from danlu.storage.data.version_log import DatasetVersionLog


class TrainData:
    """Opens a run's data and loads this rank's batches. All ranks make one, and call `refresh`, together."""

    def __init__(self, run: RunFolder, recipe: Recipe, mesh: ParallelMesh, cursor: int) -> None:
        """`cursor` is the sample the run starts at."""
        self._log, self._mesh = DatasetVersionLog(run.data), mesh
        self._warnings: SimpleQueue[str] = SimpleQueue()
        length, seed = recipe.batch.length, recipe.seed
        self.dataset = MixtureDataset.from_recipe(
            recipe.data, length, seed, check_sizes=mesh.rank == 0, on_warning=self._warnings.put
        )
        self._loader = BatchLoader(
            self.dataset,
            recipe.batch,
            recipe.model.vocabulary,
            mesh,
            document_mask=recipe.data.document_mask,
            loss_mask=self.dataset.has_loss_mask,
            tokens_ahead=recipe.mtp.depth if recipe.mtp else 0,
        )
        self.refresh(cursor)

    def at(self, cursor: int) -> Batch:
        """The batch whose first sample is number `cursor`."""
        return self._loader.at(cursor)

    def pop_warnings(self) -> list[str]:
        """What the user should know about the data and was not told yet."""
        found: list[str] = []
        while not self._warnings.empty():
            found.append(self._warnings.get())
        return found

    def refresh(self, cursor: int) -> None:
        """Read what was appended meanwhile from sample `cursor` on, which no rank has read yet.

        Rank 0 looks and broadcasts, because another machine's view of a folder may lag behind.
        """
        schedule = self._logged_versions(cursor) if self._mesh.rank == 0 else []
        count = torch.tensor(len(schedule), device=self._mesh.device)
        self._mesh.world.broadcast(count)
        shape = (int(count), 1 + len(self.dataset.sources))
        rows = torch.tensor([[start, *versions] for start, versions in schedule] or 0, device=self._mesh.device)
        rows = rows.expand(shape).contiguous()
        self._mesh.world.broadcast(rows)
        schedule = [(start, tuple(versions)) for start, *versions in rows.tolist()]
        if schedule != self.dataset.version_schedule:
            self._loader.drop_prefetched()
            self.dataset.set_version_schedule(schedule)

    def _logged_versions(self, cursor: int) -> list[VersionSwitch]:
        """Versions the run reads, new ones logged; where the log cannot be written, new ones wait for the next time."""
        try:
            return update_version_log(self._log, self.dataset, cursor)
        except OSError as error:
            if not self.dataset.version_schedule:
                raise
            self._warnings.put(f"data that was appended is not read yet: the version log cannot be written: {error}")
            return self.dataset.version_schedule
