"""The entry point of one training process: from a run's folder to its last step."""

import gc
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from danlu.comm.connection_check import unauthorized_connection_error
from danlu.comm.flight_record import (
    FlightRecordError,
    FlightWriter,
    flight_path,
    make_flight_folder,
    stack_path,
)
from danlu.comm.flight_recorder import FlightRecorder
from danlu.comm.launcher_link import LauncherLink, RegroupOrder
from danlu.comm.peer_failure import is_peer_failure
from danlu.comm.rendezvous import RankInfo
from danlu.framework.atomic_append import AtomicAppendFile
from danlu.framework.stages import NoProgress, ProgressStage
from danlu.framework.step_guard import stop_on_signal
from danlu.resilience.stacks import dump_stacks_on_signal
from danlu.session import Session
from danlu.spec import (
    RankFailureEvent,
    RunFolder,
)
from danlu.spec.profile import ProfileRequest
from danlu.storage import run_lock

_MAX_FAILURE_LENGTH = 4_000
"""Characters of an error in a rank's events; its log has all of them."""


_ORDER_SECONDS = 30.0
"""How long a rank whose peers are gone waits to be told what to do; a launcher sees a death in a tenth of a second."""


def run_worker(
    run: RunFolder,
    rank_info: RankInfo,
    link: LauncherLink | None = None,
    *,
    locked: bool = False,
    peak_cache: Path | None = None,
    evaluate_step: int | None = None,
    profile: ProfileRequest | None = None,
    recoverable: bool = False,
    order: RegroupOrder | None = None,
) -> None:
    """Train the run in `run` as one rank; resumes from its newest checkpoint if there is one.

    If the launcher replaces ranks that fail (`recoverable`), this one keeps its newest states in its host's memory, and
    joins another world when it is ordered to. A rank that takes another's place is started with such an `order`.

    With `evaluate_step` the checkpoint of that step is evaluated instead, with `profile` a few steps are profiled, and
    nothing is trained.

    The FLOP/s that were measured on this machine are kept in `peak_cache`. Whoever launches ranks holds the run's lock
    before it writes anything; where nobody does (`locked` is false), rank 0 takes it.
    """
    link = link or LauncherLink()
    session: Session | None = None
    try:
        with ExitStack() as stack, stop_on_signal() as stop:
            stack.enter_context(nullcontext() if locked or rank_info.rank else run_lock.acquire(run))
            link.report_phase("waiting for the other ranks" if rank_info.world_size > 1 else "building the model")
            trains = evaluate_step is None and profile is None
            recorder = _flight_recorder(run, rank_info.rank) if trains else nullcontext(NoProgress())
            progress = stack.enter_context(recorder)
            while True:
                session = None
                try:
                    session = Session(
                        run,
                        rank_info if order is None else replace(rank_info, endpoint=order.endpoint),
                        link,
                        order=order,
                        peak_cache=peak_cache,
                        progress=progress,
                        recoverable=recoverable,
                    )
                    with session:
                        if evaluate_step is not None:
                            session.evaluate(evaluate_step)
                        elif profile is not None:
                            session.profile(profile)
                        else:
                            session.train(stop)
                    return
                except Exception as error:
                    generation = order.generation if order else 0
                    patience = _ORDER_SECONDS if recoverable and is_peer_failure(error) else 0.0
                    if patience:
                        link.report_lost(generation)
                    order = link.order_after(generation, patience)
                    if order is None:
                        raise
                    sys.stderr.write(f"rank {rank_info.rank} joins generation {order.generation}: {order.cause}\n")
                    traceback.clear_frames(error.__traceback__)  # they hold the model, for which memory is needed now
                session = None
                gc.collect()
                progress.begin_world()
    except Exception as error:
        unauthorized = unauthorized_connection_error() if rank_info.is_single_host else None
        step = session.step if session is not None else None
        _record_failure(run, rank_info.rank, step, unauthorized or error, link)
        raise


@contextmanager
def _flight_recorder(run: RunFolder, rank: int) -> Iterator[ProgressStage]:
    """Record what this rank does where others of this host can read it, also after its death.

    A host without room for that is told in the rank's log, and the run goes on.
    """
    try:
        make_flight_folder(run.path)
        dump_stacks_on_signal(run.path, rank)
        writer = FlightWriter(flight_path(run.path, rank), rank)
    except (FlightRecordError, OSError) as error:
        sys.stderr.write(f"rank {rank}: nothing will be known about a hang of this rank: {error}\n")
        yield NoProgress()
        return
    recorder = FlightRecorder(writer)
    try:
        yield recorder
    finally:
        recorder.close()
    stack_path(run.path, rank).unlink(missing_ok=True)  # not after a failure: `danlu why` reads what is left
    writer.remove()


def _record_failure(run: RunFolder, rank: int, step: int | None, error: Exception, link: LauncherLink) -> None:
    """Write this rank's failure into a file of its own; the launcher hears of it if the disk cannot be written."""
    words = " ".join(str(error).split())[:_MAX_FAILURE_LENGTH]
    failure = RankFailureEvent(
        time=time.time(),
        rank=rank,
        step=step,
        error=type(error).__name__,
        message=words,
        explained=bool(type(error).__module__.startswith("danlu.") and words),
        host=socket.gethostname(),
        pid=os.getpid(),
    )
    line = failure.model_dump_json()
    file = AtomicAppendFile(run.rank_events(rank))
    try:
        file.append(f"{line}\n".encode())
    except OSError as disk:
        sys.stderr.write(f"rank {rank}: its failure could not be written to {file.path}: {disk.strerror}\n")
        link.report_event(line)
    finally:
        file.close()
