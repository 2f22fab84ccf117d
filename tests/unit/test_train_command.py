"""From a recipe to a run's folder, and ranks as processes: what `danlu train` does before and around training."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from made_runs import make_run

from danlu.cli import local_launcher, prepare
from danlu.cli.local_launcher import LocalLauncher
from danlu.cli.prepare import choose_new_run_folder, ensure_dataset, prepare_locked_run, prepare_unlocked_run
from danlu.cli.train import _world_size, prepare_resume
from danlu.spec import RunFolder, SpecError, load_plan, load_recipe
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
    run = prepare_unlocked_run(recipe, None, None, None, world=2)
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
    written = load_recipe(prepare_unlocked_run(recipe, None, None, None, world=1).recipe)
    assert written.data.source[0] == "python-stdlib"


def test_a_contradiction_leaves_nothing_behind(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"batch\.sequences: is 4, but must be a multiple of"):
        prepare_unlocked_run(recipe, None, None, None, world=3)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["made", "recipe.toml", "text.txt"]


def test_a_second_run_takes_the_shards_as_they_are(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare_unlocked_run(recipe, None, None, None, world=1)
    assert "building token shards" in capsys.readouterr().out
    index = Path("made/shards/index.json")
    before = index.stat().st_mtime_ns
    assert prepare_unlocked_run(recipe, None, None, None, world=1).name == "small-2"
    assert capsys.readouterr().out == ""
    assert index.stat().st_mtime_ns == before


# --- data that does not suit


def line_of(path: Path, key: str) -> int:
    return next(n for n, text in enumerate(path.read_text().splitlines(), start=1) if text.startswith(key))


def test_a_vocabulary_that_is_too_small_is_named_with_its_line(recipe: Path) -> None:
    recipe.write_text(RECIPE.replace("264", "200"))
    with pytest.raises(SpecError) as refused:
        prepare_unlocked_run(recipe, None, None, None, world=1)
    line, key, message, suggestion = problem(refused)
    assert (line, key) == (line_of(recipe, "vocabulary"), "model.vocabulary")
    assert message == "is 200, but the tokenizer has token ids up to 256"
    assert suggestion == "at least 257"
    assert not Path("runs").exists()
    assert not Path("made/shards").exists(), "told before anything is built"


def test_shards_of_another_tokenizer_are_refused(recipe: Path) -> None:
    build_dataset(["made/text.txt"], Path("made/shards"), BytesTokenizer(name="other"))
    with pytest.raises(SpecError) as refused:
        ensure_dataset(recipe, load_recipe(prepare_relative(recipe)))
    line, key, message, suggestion = problem(refused)
    assert (line, key) == (line_of(recipe, "shards"), "data.shards")
    assert message == 'was built with tokenizer "other", but the recipe says "bytes"'
    assert "--force" in suggestion


def test_missing_shards_without_a_source_say_how_to_build_them(recipe: Path) -> None:
    recipe.write_text(RECIPE.replace('source = ["text.txt"]\n', ""))
    with pytest.raises(SpecError) as refused:
        ensure_dataset(recipe, load_recipe(prepare_relative(recipe)))
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
    assert [_world_size(None, None), _world_size(3, None), _world_size(None, plan), _world_size(4, plan)] == [
        1,
        3,
        4,
        4,
    ]
    with pytest.raises(SpecError) as refused:
        _world_size(2, plan)
    assert problem(refused) == (2, "degrees", "lay out 4 ranks, but --nproc is 2", "--nproc 4, or omit it")


# --- ranks as processes


class Sleepers(LocalLauncher):
    """Ranks that run a line of Python each instead of a worker."""

    lines: tuple[str, ...] = ()

    def _start(self, rank: int, store: str, environment: dict[str, str]) -> "subprocess.Popen[bytes]":
        with self.log_path(rank).open("ab") as log:
            command = [sys.executable, "-c", self.lines[rank]]
            return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)


def ranks(tmp_path: Path, *lines: str) -> Sleepers:
    run = make_run(tmp_path / "run")
    kind = type("Ranks", (Sleepers,), {"lines": lines})
    made: Sleepers = kind(run, len(lines))
    return made


FOREVER = "import time; time.sleep(60)"


def test_ranks_that_end_well_have_no_failure_and_are_looked_at(tmp_path: Path) -> None:
    made, looks = ranks(tmp_path, "print('hello')", "pass"), []
    with made:
        assert made.wait(lambda: looks.append(1)) is None
    assert looks
    assert made.log_path(0).read_text() == "hello\n"


def test_the_rank_that_failed_is_named_and_the_others_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_launcher, "_GRACE_PERIOD", 0.2)
    made = ranks(tmp_path, FOREVER, "import sys; sys.exit('out of memory')", FOREVER)
    started = time.monotonic()
    with made:
        assert made.wait(lambda: None) == 1
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

    def interrupt_when_it_is_time() -> None:
        if awaited and awaited[0] in made.log_path(0).read_text():
            awaited.pop(0)
            os.kill(os.getpid(), number)

    with made:
        assert made.wait(interrupt_when_it_is_time) == 0
    assert made.log_path(0).read_text().split() == ["ready", "asked"]
    assert made.processes[0].returncode == -signal.SIGKILL
    assert signal.getsignal(number) is before


def test_no_rank_outlives_the_command_that_watches_it(tmp_path: Path) -> None:
    def look() -> None:
        raise OSError("disk full while drawing")

    made = ranks(tmp_path, FOREVER, FOREVER)
    with pytest.raises(OSError, match="disk full"), made:
        made.wait(look)
    assert [process.poll() for process in made.processes] == [-signal.SIGKILL] * 2


def test_the_rank_that_said_first_that_it_failed_is_named(tmp_path: Path) -> None:
    say = "import sys; print('rank {} failed at {}: ValueError: no', flush=True); sys.exit(1)"
    made = ranks(tmp_path, say.format(0, 20.5), say.format(1, 10.5), say.format(2, 30.5))
    with made:
        assert made.wait(lambda: None) == 1


def test_two_runs_started_at_once_get_two_names(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(path: Path, made: object) -> None:  # another start takes the name while this one builds its data
        Path("runs/small").mkdir(parents=True)

    monkeypatch.setattr(prepare, "ensure_dataset", slow)
    assert prepare_unlocked_run(recipe, None, None, None, world=1).name == "small-2"


def test_a_name_with_a_folder_is_refused(recipe: Path) -> None:
    with pytest.raises(SpecError, match=r'is "\.\./mine", but must be letters'):
        prepare_unlocked_run(recipe, None, None, "../mine", world=1)


def test_ranks_share_the_processors_unless_the_user_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    say = "import os; print(os.environ['OMP_NUM_THREADS'])"
    with ranks(tmp_path, say, say) as made:
        made.wait(lambda: None)
    expected = max(1, len(os.sched_getaffinity(0)) // 2)
    assert [int(made.log_path(rank).read_text()) for rank in range(2)] == [expected] * 2
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with ranks(tmp_path / "other", say) as made:
        made.wait(lambda: None)
    assert made.log_path(0).read_text() == "7\n"


def test_real_workers_of_a_folder_that_cannot_be_trained_fail_at_once_without_a_traceback(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "empty")
    run.path.mkdir()
    with LocalLauncher(run, 1) as made:
        assert made.wait(lambda: None) == 0
    said = made.log_path(0).read_text()
    assert made.processes[0].returncode == 2
    assert "recipe.toml:1: file: does not exist" in said
    assert "Traceback" not in said


# --- who may read it, and folders that take nothing


@pytest.mark.parametrize(("access", "rights"), [("owner", 0o700), ("group", 0o750), ("everyone", 0o755)])
def test_a_run_is_private_to_its_owner_unless_the_recipe_lets_others_in(recipe: Path, access: str, rights: int) -> None:
    before = os.umask(0)
    try:
        recipe.write_text(RECIPE.replace("steps = 2\n", f'steps = 2\naccess = "{access}"\n'))
        run = prepare_unlocked_run(recipe, None, None, None, world=1)
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
        prepare_unlocked_run(recipe, None, None, None, world=1)
    assert "\n" not in str(refused.value)


def test_a_layout_that_the_disk_does_not_take_leaves_the_old_one(recipe: Path) -> None:
    run = prepare_unlocked_run(recipe, None, None, None, world=1)
    before = run.plan.read_bytes()
    run.plan.with_name(".plan.toml.new").mkdir()  # stands for a disk without room
    with pytest.raises(RunError, match="cannot be written to"):
        prepare_resume(run.name, 2, None, None)
    assert run.plan.read_bytes() == before
    acquire(run).release()


def test_ranks_hold_the_lock_and_a_link_to_their_launcher(recipe: Path) -> None:
    run, lock = prepare_locked_run(recipe, None, None, None, 1)
    with LocalLauncher(run, 1, lock) as made:
        lock.release()
        until_phase = time.monotonic() + 60
        while "importing torch" not in made.links.slowest_phase and time.monotonic() < until_phase:
            made.links.poll_events()
            time.sleep(0.02)
        assert made.links.slowest_phase == "importing torch"
        with pytest.raises(RunError):
            acquire(run)
    acquire(run).release()


def test_a_run_that_somebody_runs_is_not_touched(recipe: Path) -> None:
    run, lock = prepare_locked_run(recipe, None, None, None, 1)
    before = run.plan.read_bytes()
    with pytest.raises(RunError, match="is running"):
        prepare_resume(run.name, 2, None, None)
    assert run.plan.read_bytes() == before
    lock.release()
    prepare_resume(run.name, 2, None, None)[1].release()
    assert run.plan.read_bytes() != before
