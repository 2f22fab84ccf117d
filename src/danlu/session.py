"""One rank of a run in one world: build, restore, train, and leave."""

import socket
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from math import ceil
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from danlu.chips.descriptor import ChipDescriptor
from danlu.chips.registry import find_chip
from danlu.comm.chosen_collectives import MeasuredChoice
from danlu.comm.connection_check import check_connections
from danlu.comm.flight_record import (
    make_flight_folder,
)
from danlu.comm.launcher_link import (
    CHECK_STORE,
    FIND_CHECKPOINT,
    FIRST_STEP,
    OPEN_DATA,
    RESTORE,
    LauncherLink,
    RegroupOrder,
)
from danlu.comm.mesh import ParallelMesh, build_mesh
from danlu.comm.peak_flops import PeakCacheKey, measure_peak
from danlu.comm.rank_layout import network_spans
from danlu.comm.rendezvous import RankInfo, rendezvous
from danlu.comm.world import World
from danlu.framework.build import ForwardBackward, build_train_state
from danlu.framework.checkpoint_manager import CheckpointManager
from danlu.framework.evaluation import Evaluation
from danlu.framework.event_metrics import MetricsSink
from danlu.framework.event_writer import EventWriter, RankEvents
from danlu.framework.fp8.apply import emulated_formats
from danlu.framework.injected_faults import FaultInjection
from danlu.framework.loop import TrainStages, run_training_loop
from danlu.framework.metrics_server import MetricsServer
from danlu.framework.model_size import model_size_and_flops
from danlu.framework.precision import DTYPES
from danlu.framework.prompt_sampler import PromptSampler
from danlu.framework.replica_vote import ReplicaVote
from danlu.framework.sample_continuity import SampleContinuity, check_sample_continuity
from danlu.framework.stages import EvaluationStage, NoEvaluation, NoProgress, NoSnapshots, ProgressStage
from danlu.framework.state import TrainState
from danlu.framework.state_snapshots import StateSnapshots
from danlu.framework.train_data import TrainData
from danlu.framework.wandb_writer import WandbWriter
from danlu.framework.weights import load_weights
from danlu.language.register import use_kernels
from danlu.ops.operators.routing import route_operators
from danlu.parallel.chunked_dispatch import why_nothing_is_hidden
from danlu.spec import (
    Cluster,
    EndEvent,
    EvaluationEvent,
    Event,
    Plan,
    RecoveryEvent,
    ResumeEvent,
    RunFolder,
    StartEvent,
    WarningEvent,
    load_cluster,
    load_plan,
    load_recipe,
)
from danlu.spec.event import PeakSource
from danlu.spec.profile import ProfileRequest
from danlu.spec.recipe import has_experts
from danlu.spec.samples import Sample, SampleSet
from danlu.storage.access import set_umask
from danlu.storage.checkpoint.async_saver import SavePolicy
from danlu.storage.checkpoint.engine import CheckpointEngine, local_copy_path, open_checkpoint_engine
from danlu.storage.checkpoint.peer_hosts import PeerHosts
from danlu.storage.checkpoint.peer_snapshots import PeerSnapshots
from danlu.storage.checkpoint.run_store import run_store_location
from danlu.storage.data.mixture_dataset import MixtureDataset
from danlu.storage.data.shuffle import IntArray
from danlu.storage.sample_files import write_samples
from danlu.torch_compat import PrefixStore, Store


class ProfileUnsupportedError(RuntimeError):
    """A profile of this chip would give times to the wrong parts."""


class Session:
    """One rank of a run in one world: joins it, builds, trains, and leaves; another session may follow in this process.

    with Session(run, rank_info, generation=1) as session:
        session.train(stop)
    """

    def __init__(
        self,
        run: RunFolder,
        rank_info: RankInfo,
        link: LauncherLink | None = None,
        *,
        store: Store | None = None,
        generation: int = 0,
        order: RegroupOrder | None = None,
        peak_cache: Path | None = None,
        progress: ProgressStage | None = None,
        recoverable: bool = False,
    ) -> None:
        """Join the world of all ranks that meet at `store`, or at `rank_info.endpoint`; returns when they are there.

        With an `order` it is the world after one that lost ranks, and its state is the newest that outlived them.
        """
        self.run, self.rank_info, self.link = run, rank_info, link or LauncherLink()
        self.order, self.recoverable = order, recoverable
        self.peak_cache, self.progress = peak_cache, progress or NoProgress()
        self.step: int | None = None
        """Steps done when training ended, however it ended; None before it began."""
        self.recipe = load_recipe(run.recipe)
        plan = Plan.model_validate_json(order.plan) if order and order.plan else load_plan(run.plan)
        set_umask(self.recipe.access)
        self.cluster = load_cluster(str(run.cluster)) if run.cluster.exists() else None
        self.chip = find_chip(self.cluster.chip.kind if self.cluster else None)
        device = self.chip.runtime.set_device(rank_info.local_rank)
        use_kernels(device)
        route_operators(plan.operators, device)
        backend = _backend(self.chip, rank_info)
        generation = order.generation if order else generation
        self.link.report_generation(generation)
        self.world = World.join(
            rank_info,
            backend,
            store or rendezvous(rank_info, generation),
            device,
            generation=generation,
            canceled=partial(self._is_superseded, generation) if recoverable else None,
            levels=network_spans(self.cluster, rank_info.world_size),
            choice=MeasuredChoice(self.cluster.levels) if self.cluster else None,
        )
        self.link.on_order = self.world.interrupt
        try:
            self.mesh = build_mesh(plan, self.world, self.cluster, experts=has_experts(self.recipe.model))
            if rank_info.is_single_host:
                check_connections()
        except BaseException:
            self.world.shutdown()
            raise

    def _is_superseded(self, generation: int) -> bool:
        return self.link.order_after(generation) is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.link.on_order = _do_nothing
        self.world.shutdown()

    def train(self, stop: Callable[[], bool]) -> Literal["finished", "stopped"]:
        """Build, resume and train until the recipe's steps are done or any rank's `stop` is true."""
        recipe, mesh, link = self.recipe, self.mesh, self.link
        link.report_phase("building the model")
        state, forward_backward = build_train_state(recipe, mesh.plan, mesh, reproduce_in=self.run.compiled_blocks)
        events = RankEvents(mesh.rank)  # they wait for `started`, which has the step that is found here
        for fallback in mesh.world.fallbacks:
            events.warn(fallback)
        experts = mesh.chunked_group if mesh.rank == 0 else None
        if experts and (warning := why_nothing_is_hidden(experts, mesh.plan.dispatch_chunks)):
            events.warn(warning)
        manager = CheckpointManager(self._open_checkpoints(), recipe.checkpoint, mesh.rank, events)
        snapshots = self._open_snapshots(state, events)
        try:
            return self._train(state, forward_backward, manager, snapshots, events, stop)
        except BaseException:
            manager.abort()  # this process may go on in another world
            raise
        finally:
            if snapshots is not None:
                snapshots.close()

    def _train(
        self,
        state: TrainState,
        forward_backward: ForwardBackward,
        manager: CheckpointManager,
        snapshots: StateSnapshots | None,
        events: RankEvents,
        stop: Callable[[], bool],
    ) -> Literal["finished", "stopped"]:
        recipe, mesh, link = self.recipe, self.mesh, self.link
        source = self._restore(state, manager, snapshots)
        first_on_host = self.rank_info.local_rank == 0
        if self.order is None:
            link.report_phase(CHECK_STORE)
            manager.preflight(state, first_on_host=first_on_host, between_failures=_run_mtbf(mesh, self.cluster))
        else:
            manager.checkpoints.allocate_staging(state.tensors(), first_on_host=first_on_host)
        if recipe.checkpoint.scrub:
            manager.checkpoints.start_scrubbing(3600 * recipe.checkpoint.scrub)
        link.report_phase(OPEN_DATA)
        data = TrainData(self.run, recipe, mesh, state.cursor)
        evaluation: EvaluationStage = NoEvaluation()
        if recipe.evaluation.data or recipe.evaluation.prompts:
            sampler = None
            if recipe.evaluation.prompts:
                sampler = PromptSampler(recipe, mesh, data.dataset.end_of_text)
            keep = partial(self._save_samples, events)
            evaluation = Evaluation(recipe, mesh, state, events.warn, link.report_phase, sampler, keep, self.progress)
        if mesh.rank == 0 and (emulated := emulated_formats(recipe.precision, mesh.device)):
            events.warn(
                f"chip {self.chip.name} has no block-scaled {' and '.join(emulated)} products: they are emulated, with "
                "the same numbers, and are slower than unquantized ones"
            )
        begun = list[Event]()
        if self.order is None or not self.order.has_started or self.order.resized:
            link.report_phase("measuring the peak of this machine")
            begun.append(self._start_event(state.step, data.dataset.baseline_loss))
        if self.order is not None and self.order.has_started:
            begun.append(self._recovery_event(self.order, state.step, source))
        if self.rank_info.is_single_host:
            check_connections()  # again: connections may have been opened since
        sinks = self._metrics_sinks(events) if mesh.rank == 0 else []
        with EventWriter(self.run, state.step, link.report_event, sinks) if mesh.rank == 0 else nullcontext() as writer:
            if writer is not None:
                events.write_to(writer.write)
                for event in (*begun, *_add_continuity(events.waiting, self.run, data.dataset)):
                    writer.write(event)
            link.report_phase(FIRST_STEP)
            if self.recoverable:
                where = self.run.path, mesh.rank
                forward_backward = FaultInjection(forward_backward, *where, state.parameters, self.world.interrupt)
            stages = TrainStages(
                data,
                forward_backward,
                manager,
                evaluation,
                events,
                stop,
                self.chip.runtime.max_memory,
                self.progress,
                snapshots or NoSnapshots(),
                frozenset(self.order.quarantined if self.order else ()),
            )
            try:
                if source == "memory":
                    manager.save_if_lost(state, last=state.step == recipe.steps)
                run_training_loop(recipe, state, mesh, stages)
                manager.close()
            finally:
                self.step = state.step
            outcome: Literal["finished", "stopped"] = "finished" if state.step == recipe.steps else "stopped"
            events.write(EndEvent(time=time.time(), step=state.step, outcome=outcome))
        return outcome

    def _open_snapshots(self, state: TrainState, events: RankEvents) -> StateSnapshots | None:
        """Memory for the newest states of this rank; None if the run asks for none, or a host has no room for them."""
        config = self.recipe.resilience
        if not self.recoverable or not config.snapshots:
            return None
        folder = make_flight_folder(self.run.path)
        hosts, info = None, self.rank_info
        if not info.is_single_host:
            assert self.world.store is not None
            store = PrefixStore("snapshots", self.world.store)
            hosts = PeerHosts.find(self.world, store, folder, info.local_rank, info.endpoint)
        if hosts is None and config.peers and self.world.rank == 0:
            events.warn("`resilience.peers` asks for copies in another host's memory, but there is only one host")
        peers = PeerSnapshots(hosts, self.world.rank) if hosts else None
        vote = ReplicaVote(self.mesh) if config.vote and self.mesh.size("replicate") > 1 else None
        return StateSnapshots.open(folder, state, self.world, config, peers, vote, events.warn)

    def _restore(
        self, state: TrainState, manager: CheckpointManager, snapshots: StateSnapshots | None
    ) -> Literal["memory", "checkpoint", "start"]:
        """Restore the newest state there is; where it was."""
        if self.order is not None and snapshots is not None:
            self.link.report_phase(RESTORE)
            if snapshots.restore(state):
                return "memory"
        self.link.report_phase(FIND_CHECKPOINT)
        if manager.resume(state):
            return "checkpoint"
        if self.recipe.weights:
            load_weights(state.stage_modules, self.recipe.model, Path(self.recipe.weights))
        return "start"

    def _recovery_event(
        self, order: RegroupOrder, step: int, source: Literal["memory", "checkpoint", "start"]
    ) -> RecoveryEvent:
        now = time.time()
        return RecoveryEvent(
            time=now,
            step=step,
            generation=order.generation,
            ranks=order.ranks,
            cause=order.cause,
            source=source,
            seconds=now - order.failed_at,
        )

    def _metrics_sinks(self, events: RankEvents) -> list[MetricsSink]:
        """Where metrics go beside the run's folder; what cannot be had is a warning, and training goes on."""
        config, sinks = self.recipe.metrics, list[MetricsSink]()
        if config.port:
            try:
                sinks.append(MetricsServer(self.run.name, config.port))
            except OSError as error:
                message = f"metrics are not served: port {config.port} of this host cannot be had: {error.strerror}"
                events.warn(f"{message}; set another `metrics.port`")
        if config.wandb:
            sinks.append(WandbWriter(self.run, self.recipe, events.warn))
        return sinks

    def _save_samples(self, events: RankEvents, step: int, samples: list[Sample]) -> None:
        """Keep samples of a step in the run's folder; a disk that cannot be written does not end the run."""
        if self.mesh.rank != 0:
            return
        drawn = SampleSet(
            run=self.run.name,
            step=step,
            time=time.time(),
            temperature=0,
            top_k=0,
            top_p=1,
            seed=0,
            dtype=self.recipe.precision.compute,
            samples=tuple(samples),
        )
        try:
            write_samples(self.run, drawn)
        except OSError as error:
            events.warn(f"samples of step {step} are lost: {self.run.samples} cannot be written: {error.strerror}")

    def evaluate(self, step: int) -> EvaluationEvent:
        """Evaluate the checkpoint of a step on the recipe's held-out data; rank 0 writes the event."""
        recipe, mesh, link = self.recipe, self.mesh, self.link
        link.report_phase("building the model")
        state, _ = build_train_state(recipe, mesh.plan, mesh)
        link.report_phase("reading the checkpoint")
        checkpoints = self._open_checkpoints()
        checkpoints.load(step, state.model_tensors())
        checkpoints.close()
        events = RankEvents(mesh.rank)
        evaluation = Evaluation(recipe, mesh, state, events.warn, link.report_phase)
        evaluated = evaluation.run(step)
        if mesh.rank == 0:
            with EventWriter(self.run, step, link.report_event) as writer:
                for event in (*events.waiting, evaluated):
                    writer.write(event)
        return evaluated

    def profile(self, request: ProfileRequest) -> None:
        """Profile steps from the newest checkpoint on; each profiled rank writes what it measured, nothing is saved."""
        from danlu.profiler.rank_profiler import profile_rank

        recipe, mesh, link = self.recipe, self.mesh, self.link
        if mesh.device.type != "cpu":
            raise ProfileUnsupportedError(
                f"a profile attributes the time of the thread that runs operators, but on chip {self.chip.name} they "
                "run on the device, behind it: use its vendor's profiler for now"
            )
        link.report_phase("building the model")
        state, forward_backward = build_train_state(recipe, mesh.plan, mesh)
        link.report_phase("reading the checkpoint")
        checkpoints = self._open_checkpoints()
        if (step := checkpoints.latest_step()) is not None:
            state.restore_scalars(checkpoints.load(step, state.tensors())[0])
        elif recipe.weights:
            load_weights(state.stage_modules, recipe.model, Path(recipe.weights))
        checkpoints.close()
        # The steps may lie behind the run's last one.
        last = state.step + request.warmup + 2 * request.steps + 1
        recipe = recipe.model_copy(update={"steps": max(recipe.steps, last)})
        link.report_phase(OPEN_DATA)
        data = TrainData(self.run, recipe, mesh, state.cursor)
        stages = TrainStages(data, forward_backward, memory_peak=self.chip.runtime.max_memory)
        found = profile_rank(recipe, state, mesh, stages, request, link.report_phase)
        if found is not None:
            self.run.rank_profile(mesh.rank).write_text(found.model_dump_json())

    def _open_checkpoints(self) -> CheckpointEngine:
        config = self.recipe.checkpoint
        where, options = run_store_location(self.run, config)
        policy = SavePolicy(
            parity=config.parity,
            parity_group_size=config.group,
            retries=config.retries,
            bandwidth=1e6 * config.bandwidth,
            local_copy_folder=local_copy_path(config.near, where) if config.near else None,
        )
        degrees = self.mesh.plan.degrees.model_dump()
        checkpoints = open_checkpoint_engine(where, config.keep, self.world, degrees, policy, options)
        if config.peers:
            assert self.world.store is not None
            store = PrefixStore("checkpoints", self.world.store)
            checkpoints.enable_peer_replicas(store, self.rank_info.local_rank, self.rank_info.endpoint)
        return checkpoints

    def _start_event(self, step: int, baseline_loss: float | None) -> StartEvent:
        recipe, degrees = self.recipe, self.mesh.plan.degrees
        parameters, flops_per_token = model_size_and_flops(recipe)
        peak, peak_source, peak_spread = self._peak_flops()
        return StartEvent(
            time=time.time(),
            world=degrees.world,
            chip=self.chip.name,
            parameters=parameters,
            step=step,
            steps=recipe.steps,
            tokens_per_step=recipe.batch.tokens,
            flops_per_token=flops_per_token,
            peak=peak,
            peak_source=peak_source,
            peak_spread=peak_spread,
            dtype=recipe.precision.peak_dtype(self.cluster.chip.peak if self.cluster else ()),
            host=socket.gethostname(),
            layout={axis: degree for axis, degree in degrees.model_dump().items() if degree > 1},
            baseline_loss=baseline_loss,
        )

    def _peak_flops(self) -> tuple[float, PeakSource, float | None]:
        """FLOP/s of all ranks that MFU is computed against, where the figure comes from, and its spread."""
        dtype, cache = self.recipe.precision.compute, self.peak_cache
        if self.cluster is not None:
            chip = self.cluster.chip
            source: PeakSource = "measured by danlu probe" if chip.measured else "data sheet"
            return chip.peak[self.recipe.precision.peak_dtype(chip.peak)] * self.world.size, source, None
        key = PeakCacheKey(cache, self.chip.name, dtype, self.rank_info.local_rank)
        found = measure_peak(self.world, DTYPES[dtype], key)
        return found.best, "measured on this machine" if cache else "measured at start", found.spread


def _do_nothing() -> None:
    pass


def _run_mtbf(mesh: ParallelMesh, cluster: Cluster | None) -> float | None:
    """Mean seconds between failures of the whole run: it fails as often as any of its nodes."""
    if cluster is None or cluster.failures is None:
        return None
    return cluster.failures.node_mtbf / ceil(mesh.plan.degrees.world / cluster.chips_per_node)


def _add_continuity(events: list[Event], run: RunFolder, data: MixtureDataset) -> list[Event]:
    """What was found when the run resumed, with what the run's history says of its samples."""
    told: list[Event] = []
    for event in events:
        if isinstance(event, ResumeEvent):
            found = _continuity(event, run, data)
            if found is not None:
                event = event.model_copy(update={"repeated": found.repeated, "skipped": found.skipped})
                told += _continuity_warning(event)
        told.append(event)
    return told


def _continuity(event: ResumeEvent, run: RunFolder, data: MixtureDataset) -> SampleContinuity | None:
    try:
        history = list(run.read_events())
    except ValueError:  # a line that is no event: whoever shows the run names it, and nothing is claimed of samples
        return None

    def which(indices: IntArray) -> list[tuple[int, int, int]]:
        places = data.locate(indices)
        return [(place.source, data.epoch_of(place.source, place.source_index), place.sample_id) for place in places]

    return check_sample_continuity(history, event.step, event.samples, data.length, which)


def _continuity_warning(event: ResumeEvent) -> list[Event]:
    if not event.repeated and not event.skipped:
        return []
    message = (
        f"the checkpoint of step {event.step} counts {event.samples} samples, but the steps up to it consumed others: "
        f"{event.repeated} are read again and {event.skipped} never; was the length of a sequence or the batch changed?"
    )
    return [WarningEvent(time=event.time, rank=0, message=message)]


def _backend(chip: ChipDescriptor, rank_info: RankInfo) -> str:
    if chip.backend is not None:
        return chip.backend
    if rank_info.world_size > 1:
        raise RuntimeError(
            f"chip {chip.name} must offer collectives for {rank_info.world_size} ranks, but has none; use 1 rank"
        )
    return "gloo"  # never used by a run of one rank
