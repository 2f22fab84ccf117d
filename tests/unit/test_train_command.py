"""From a recipe to a run's folder, and ranks as processes: what `danlu train` does before and around training."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from made_runs import make_run

from danlu.comm.launcher_link import LauncherLink, RegroupOrder
from danlu.report.terminal import Console
from danlu.runs import prepare
from danlu.runs.dataset import ensure_dataset
from danlu.runs.prepare import choose_new_run_folder, choose_world_size, prepare_resume, prepare_run
from danlu.scheduler import LocalLauncher, follow, local_launcher
from danlu.scheduler.host_ranks import HostRanks
from danlu.spec import RankFailureEvent, RunFolder, SpecError, load_plan, load_recipe
from danlu.spec.load import read_recipe
from danlu.storage.data.build import build_dataset
from danlu.storage.data.tokenizer import BytesTokenizer
from danlu.storage.run_lock import RunError, acquire

RECIPE = """name = "small"
steps = 2

[model]
base = "tiny-llama"
vocabulary = 264

[data]
shards = "shards"
source = ["text.txt"]

[batch]
sequences = 4
length = 16
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe beside its text, seen from the folder that a command is started in."""
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    monkeypatch.chdir(tmp_path)
    path = Path("made/recipe.toml")
    path.write_text(RECIPE)
    return path


def prepared(recipe: Path, world: int) -> RunFolder:
    """A prepared run that nobody runs."""
    run, lock = prepare_run(recipe, world=world)
    lock.release()
    return run


def problem(act: pytest.ExceptionInfo[SpecError]) -> tuple[int, str, str, str]:
    (found,) = act.value.problems
    return found.line, found.key, found.message, found.suggestion


# --- names


def test_a_run_is_named_after_its_recipe_and_numbered_if_that_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = []
    for _ in range(3):
        run = choose_new_run_folder(None, "small")
        run.path.mkdir(parents=True)
        names.append(run.name)
    assert names == ["small", "small-2", "small-3"]
    assert run.path == tmp_path / "runs" / "small-3"


def test_a_name_that_was_asked_for_is_never_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    choose_new_run_folder("mine", "small").path.mkdir(parents=True)
    with pytest.raises(SpecError) as refused:
        choose_new_run_folder("mine", "small")
    _, key, message, suggestion = problem(refused)
    assert (key, suggestion) == ("name", "another name, or --resume mine")
    assert message.endswith("runs/mine")


# --- the folder


def test_a_prepared_folder_is_enough_to_start_from_anywhere(recipe: Path, tmp_path: Path) -> None:
    run = prepared(recipe, world=2)
    written = load_recipe(run.recipe)
    assert written.data.shards == str(tmp_path / "made" / "shards")
    assert written.data.source == (str(tmp_path / "made" / "text.txt"),)
    assert written.data.tokenizer == "bytes"
    assert written.model.layers == 4, "the catalog's model is written out"
    assert load_plan(run.plan).degrees.shard == 2
    assert not run.cluster.exists()
    assert (tmp_path / "made" / "shards" / "index.json").exists()


def test_words_that_are_not_paths_stay_words(recipe: Path) -> None:
    recipe.write_text(RECIPE.replace('["text.txt"]', '["python-stdlib", "text.txt"]'))
    build_dataset(["made/text.txt"], Path("made/shards"), BytesTokenizer())
    written = load_recipe(prepared(recipe, world=1).recipe)
    assert written.data.source[0] == "python-stdlib"


def test_a_contradiction_leaves_nothing_behind(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"batch\.sequences: is 4, but must be a multiple of"):
        prepared(recipe, world=3)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["made", "recipe.toml", "text.txt"]


def test_a_second_run_takes_the_shards_as_they_are(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepared(recipe, world=1)
    assert "building token shards" in capsys.readouterr().out
    index = Path("made/shards/index.json")
    before = index.stat().st_mtime_ns
    assert prepared(recipe, world=1).name == "small-2"
    assert capsys.readouterr().out == ""
    assert index.stat().st_mtime_ns == before


# --- data that does not suit


def line_of(path: Path, key: str) -> int:
    return next(n for n, text in enumerate(path.read_text().splitlines(), start=1) if text.startswith(key))


def test_a_vocabulary_that_is_too_small_is_named_with_its_line(recipe: Path) -> None:
    recipe.write_text(RECIPE.replace("264", "200"))
    with pytest.raises(SpecError) as refused:
        prepared(recipe, world=1)
    line, key, message, suggestion = problem(refused)
    assert (line, key) == (line_of(recipe, "vocabulary"), "model.vocabulary")
    assert message == "is 200, but the tokenizer has token ids up to 256"
    assert suggestion == "at least 257"
    assert not Path("runs").exists()
    assert not Path("made/shards").exists(), "told before anything is built"


def test_shards_of_another_tokenizer_are_refused(recipe: Path) -> None:
    build_dataset(["made/text.txt"], Path("made/shards"), BytesTokenizer(name="other"))
    with pytest.raises(SpecError) as refused:
        ensure_dataset(read_recipe(prepare_relative(recipe)), Console())
    line, key, message, suggestion = problem(refused)
    assert (line, key) == (line_of(recipe, "shards"), "data.shards")
    assert message == 'was built with tokenizer "other", but the recipe says "bytes"'
    assert "--force" in suggestion


def test_missing_shards_without_a_source_say_how_to_build_them(recipe: Path) -> None:
    recipe.write_text(RECIPE.replace('source = ["text.txt"]\n', ""))
    with pytest.raises(SpecError) as refused:
        ensure_dataset(read_recipe(prepare_relative(recipe)), Console())
    line, key, message, suggestion = problem(refused)
    assert (line, key) == (line_of(recipe, "shards"), "data.shards")
    assert message.endswith('made/shards" is not a data set')
    assert suggestion.startswith("danlu data build SOURCE… -o ")


def prepare_relative(recipe: Path) -> Path:
    """The recipe with its shards' path as seen from here."""
    path = recipe.with_name("here.toml")
    path.write_text(recipe.read_text().replace('shards = "shards"', 'shards = "made/shards"'))
    return path


def test_processes_are_those_of_the_plan_and_a_contradiction_is_told(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text("microbatches = 1\n[degrees]\nshard = 2\ntp = 2\n")
    asked = [(None, None), (3, None), (None, plan), (4, plan)]
    assert [choose_world_size(*each) for each in asked] == [1, 3, 4, 4]
    with pytest.raises(SpecError) as refused:
        choose_world_size(2, plan)
    assert problem(refused) == (2, "degrees", "lay out 4 ranks, but --nproc is 2", "--nproc 4, or omit it")


# --- ranks as processes


class Sleepers(HostRanks):
    """Ranks that run a line of Python each instead of a worker."""

    lines: tuple[str, ...] = ()

    def start(self, rank: int, local_rank: int, endpoint: str, order: RegroupOrder | None = None) -> None:
        with self.log_path(rank).open("ab") as log:
            command = [sys.executable, "-c", self.lines[rank]]
            self.processes[rank] = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def ranks(tmp_path: Path, *lines: str) -> LocalLauncher:
    made = LocalLauncher(make_run(tmp_path / "run"), len(lines))
    made._ranks = Sleepers(made.run, len(lines), ranks_per_host=len(lines))
    made._ranks.lines = lines
    return made


FOREVER = "import time; time.sleep(60)"


def test_ranks_that_end_well_have_no_failure_and_are_looked_at(tmp_path: Path) -> None:
    made, looks = ranks(tmp_path, "print('hello')", "pass"), []
    with made:
        assert follow(made, looks.append).exit_code == 0 and made.failed_rank is None
    assert [look.is_running for look in looks] == [True] * (len(looks) - 1) + [False]
    assert made.log_path(0).read_text() == "hello\n"


def test_the_rank_that_failed_is_named_and_the_others_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_launcher, "_GRACE_PERIOD", 0.2)
    made = ranks(tmp_path, FOREVER, "import sys; sys.exit('out of memory')", FOREVER)
    started = time.monotonic()
    with made:
        result = follow(made, lambda _: None)
    assert made.failed_rank == 1
    assert (result.exit_code, result.failure) == (1, "rank 1 ended with exit code 1: out of memory")
    assert time.monotonic() - started < 20
    assert [process.returncode for process in made.processes] == [-signal.SIGKILL, 1, -signal.SIGKILL]
    assert "out of memory" in made.log_path(1).read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_asks_the_ranks_to_stop_and_a_second_one_ends_them(tmp_path: Path, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True)); "
    stubborn += "print('ready', flush=True); time.sleep(60); time.sleep(60)"
    made = ranks(tmp_path, stubborn)

    awaited = ["ready", "asked"]

    def interrupt_when_it_is_time(_: object) -> None:
        if awaited and awaited[0] in made.log_path(0).read_text():
            awaited.pop(0)
            os.kill(os.getpid(), number)

    with made:
        result = follow(made, interrupt_when_it_is_time)
    assert result.killed_on_request and not result.failure
    assert made.log_path(0).read_text().split() == ["ready", "asked"]
    assert made.processes[0].returncode == -signal.SIGKILL
    assert signal.getsignal(number) is before


def test_no_rank_outlives_the_command_that_watches_it(tmp_path: Path) -> None:
    def look(_: object) -> None:
        raise OSError("disk full while drawing")

    made = ranks(tmp_path, FOREVER, FOREVER)
    with pytest.raises(OSError, match="disk full"), made:
        follow(made, look)
    assert [process.poll() for process in made.processes] == [-signal.SIGKILL] * 2


REPORT = """
import os, sys, time
from pathlib import Path
from danlu.spec import RankFailureEvent, RunFolder
path = RunFolder(Path({run!r})).rank_events({rank})
path.parent.mkdir(exist_ok=True)
failure = RankFailureEvent(time=time.time() + {after}, rank={rank}, step=7, error="KeyError", message="{words}",
    explained={explained}, host="here", pid=os.getpid() + {other})
with path.open("a") as events:
    events.write(failure.model_dump_json() + "\\n")
sys.exit(1)
"""


def report(run: Path, rank: int, after: float, words: str = "no", explained: bool = False, other: int = 0) -> str:
    """A rank that writes its failure, as if some seconds later, and exits."""
    return REPORT.format(run=str(run), rank=rank, after=after, words=words, explained=explained, other=other)


def test_the_rank_that_reported_its_failure_first_is_named_in_its_own_words(tmp_path: Path) -> None:
    run = tmp_path / "run"
    made = ranks(tmp_path, report(run, 0, 20), report(run, 1, 10, "the disk is on fire", True), report(run, 2, 30))
    with made:
        result = follow(made, lambda _: None)
    assert made.failed_rank == 1
    assert result.failure == "rank 1 failed: the disk is on fire"
    assert result.log_tail == (), "an explained error needs no traceback"


def test_a_failure_of_an_earlier_start_or_another_process_is_not_this_ones(tmp_path: Path) -> None:
    run = tmp_path / "run"
    made = ranks(tmp_path, report(run, 0, -1000), report(run, 1, 10, other=1))
    with made:
        result = follow(made, lambda _: None)
    assert made.failed_rank == 0
    assert result.failure == "rank 0 ended with exit code 1: no output"


def test_a_failure_that_the_disk_did_not_take_is_heard_through_the_link(tmp_path: Path) -> None:
    made = ranks(tmp_path, "import sys; sys.exit(1)")
    failure = RankFailureEvent(
        time=1.0, rank=0, step=None, error="OSError", message="disk full", explained=False, host="here", pid=1
    )
    with made:
        link = LauncherLink(made.links.open_link(0).detach())
        link.report_event(failure.model_dump_json())
        result = follow(made, lambda _: None)
        link.close()
    assert result.failure == "rank 0 failed: OSError: disk full"


def test_a_rank_that_was_replaced_does_not_shorten_the_grace_of_the_next(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Process:
        returncode: int | None = None

        def poll(self) -> int | None:
            return self.returncode

    made, ranks, now, killed = LocalLauncher(prepared(recipe, world=2), 2), [Process(), Process()], [0.0], list[int]()
    monkeypatch.setattr(LocalLauncher, "processes", ranks)
    monkeypatch.setattr(made._recovery, "look", lambda **_: None)
    monkeypatch.setattr(made, "failure", lambda _: None)
    monkeypatch.setattr(made._ranks, "signal_all", killed.append)
    monkeypatch.setattr("danlu.scheduler.local_launcher.time.monotonic", lambda: now[0])
    ranks[0].returncode = -9
    made.poll()
    ranks[0].returncode = None  # a new process
    made.poll()
    now[0] = 1000.0
    ranks[1].returncode = -9  # it has ended just after recovery looked
    made.poll()
    assert not killed and made._failed_rank is None
    now[0] = 1031.0
    made.poll()
    assert killed == [signal.SIGKILL], "nobody replaces it"


def test_two_runs_started_at_once_get_two_names(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: object) -> None:  # another start takes the name while this one builds its data
        Path("runs/small").mkdir(parents=True)

    monkeypatch.setattr(prepare, "ensure_dataset", slow)
    assert prepared(recipe, world=1).name == "small-2"


def test_a_name_with_a_folder_is_refused(recipe: Path) -> None:
    with pytest.raises(SpecError, match=r'is "\.\./mine", but must be letters'):
        prepare_run(recipe, name="../mine")


def test_ranks_share_the_processors_unless_the_user_says_otherwise(recipe: Path) -> None:
    with LocalLauncher(prepared(recipe, world=2), 2) as made:
        while not (line := Path(f"/proc/{made.fork_server_pid}/cmdline").read_bytes()):
            time.sleep(0.01)  # a process that is being replaced by its program has none for a moment
        words = line.split(b"\0")
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert (int(words[-3]), words[-2]) == (share, b"lo")
    code = (
        "import os, danlu.cli.fork_server as server; server._set_library_defaults(3, 'lo'); "
        "print(os.environ['OMP_NUM_THREADS'], os.environ['OMP_WAIT_POLICY'], os.environ['GLOO_SOCKET_IFNAME'])"
    )
    for given, expected in (({}, "3 PASSIVE lo\n"), ({"OMP_NUM_THREADS": "7"}, "7 PASSIVE lo\n")):
        plain = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GLOO_"))}
        done = subprocess.run([sys.executable, "-c", code], env=plain | given, capture_output=True, text=True)
        assert done.stdout == expected, done.stderr


def test_real_workers_of_a_folder_that_cannot_be_trained_fail_at_once_without_a_traceback(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "empty")
    run.path.mkdir()
    with LocalLauncher(run, 1) as made:
        result = follow(made, lambda _: None)
    said = made.log_path(0).read_text()
    (failure,) = run.read_rank_events(0)
    assert isinstance(failure, RankFailureEvent)
    assert (failure.rank, failure.step, failure.error, failure.explained) == (0, None, "SpecError", True)
    assert (failure.pid, failure.host) == (made.processes[0].pid, socket.gethostname())
    assert "recipe.toml:1: file: does not exist" in result.failure and result.log_tail == ()
    assert made.processes[0].returncode == 2
    assert "recipe.toml:1: file: does not exist" in said
    assert "Traceback" not in said


# --- who may read it, and folders that take nothing


@pytest.mark.parametrize(("access", "rights"), [("owner", 0o700), ("group", 0o750), ("everyone", 0o755)])
def test_a_run_is_private_to_its_owner_unless_the_recipe_lets_others_in(recipe: Path, access: str, rights: int) -> None:
    before = os.umask(0)
    try:
        recipe.write_text(RECIPE.replace("steps = 2\n", f'steps = 2\naccess = "{access}"\n'))
        run = prepared(recipe, world=1)
        with LocalLauncher(run, 1):  # ends them at once; the log is made before
            pass
        made = {path: path.stat().st_mode & 0o777 for path in (run.path, *run.path.rglob("*"))}
    finally:
        os.umask(before)
    assert len(made) >= 6
    assert {mode for path, mode in made.items() if path.is_dir()} == {rights}
    assert {mode for path, mode in made.items() if path.is_file()} == {rights & 0o666}
    assert Path("runs").stat().st_mode & 0o777 == 0o777, "the folder of all runs is as any other"


def test_nowhere_to_write_is_told_in_one_line(recipe: Path) -> None:
    Path("runs").write_text("a file where the folder should be")
    with pytest.raises(RunError, match=r"runs cannot be written to: File exists; nothing was started") as refused:
        prepared(recipe, world=1)
    assert "\n" not in str(refused.value)


def test_a_layout_that_the_disk_does_not_take_leaves_the_old_one(recipe: Path) -> None:
    run = prepared(recipe, world=1)
    before = run.plan.read_bytes()
    run.plan.with_name(".plan.toml.new").mkdir()  # stands for a disk without room
    with pytest.raises(RunError, match="cannot be written to"):
        prepare_resume(run.name, 2, None, None)
    assert run.plan.read_bytes() == before
    acquire(run).release()


def test_ranks_hold_the_lock_and_a_link_to_their_launcher(recipe: Path) -> None:
    run, lock = prepare_run(recipe)
    with LocalLauncher(run, 1, lock) as made:
        lock.release()
        until_phase = time.monotonic() + 180
        while not made.links.slowest_phase.startswith("building") and time.monotonic() < until_phase:
            made.poll()
            time.sleep(0.02)
        assert made.links.slowest_phase.startswith("building")
        with pytest.raises(RunError):
            acquire(run)
    acquire(run).release()


def test_a_run_that_somebody_runs_is_not_touched(recipe: Path) -> None:
    run, lock = prepare_run(recipe)
    before = run.plan.read_bytes()
    with pytest.raises(RunError, match="is running"):
        prepare_resume(run.name, 2, None, None)
    assert run.plan.read_bytes() == before
    lock.release()
    prepare_resume(run.name, 2, None, None)[1].release()
    assert run.plan.read_bytes() != before
