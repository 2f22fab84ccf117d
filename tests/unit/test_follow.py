"""Following a job: what is told, what is waited for, and what it comes to."""

from io import StringIO
from pathlib import Path

from danlu.cli.slurm_submit import follow_job
from danlu.report import ProgressDisplay
from danlu.report.terminal import Console
from danlu.scheduler import JobStatus, SlurmError, SlurmJob, SlurmLauncher
from danlu.spec import EndEvent, RunFolder


class TestFollow:
    def told(
        self, run: RunFolder, answers: list[JobStatus | SlurmError], every: float = 1.0
    ) -> tuple[int | SlurmError, str]:
        """Follow a job whose controller gives these answers, a while apart; what it came to and what was shown."""
        now = [0.0]
        console = Console(file=StringIO(), width=200)
        remaining = list(answers)

        def ask(_job: int) -> JobStatus:
            now[0] += every
            answer = remaining.pop(0)
            if isinstance(answer, SlurmError):
                raise answer
            return answer

        def sleep(seconds: float) -> None:
            now[0] += seconds

        job = SlurmJob(name="x", workdir="/", run_folder=str(run.path), python="python", nodes=1, tasks_per_node=1)
        launcher = SlurmLauncher(run, job, get_status=ask, clock=lambda: now[0], sleep=sleep)
        launcher.job_id = 7
        try:
            outcome: int | SlurmError = follow_job(launcher, ProgressDisplay(run, console), console)
        except SlurmError as error:
            outcome = error
        assert isinstance(console.file, StringIO)
        return outcome, console.file.getvalue()

    def status(self, state: str, reason: str = "None", code: int = 0, restarts: int = 0) -> JobStatus:
        return JobStatus(job=7, state=state, reason=reason, exit_code=code, signal=0, restarts=restarts)

    def test_every_state_is_told_once_and_a_completed_job_is_a_success(self, tmp_path: Path) -> None:
        pending, running = self.status("PENDING", "Resources"), self.status("RUNNING")
        answers: list[JobStatus | SlurmError] = [pending, pending, running, running, self.status("COMPLETED")]
        outcome, shown = self.told(RunFolder(tmp_path), answers)
        assert outcome == 0
        assert shown.splitlines() == ["job 7: pending (Resources)", "job 7: running", "job 7: completed"]

    def test_a_failure_gives_its_code_and_shows_the_end_of_the_log(self, tmp_path: Path) -> None:
        run = RunFolder(tmp_path)
        run.logs.mkdir()
        (run.logs / "job.log").write_text("first words\n" + "more\n" * 20 + "srun: error: n1: task 3: Exited\n")
        outcome, shown = self.told(run, [self.status("RUNNING"), self.status("FAILED", "NonZeroExitCode", code=3)])
        assert outcome == 3
        assert (
            "job 7 ended as FAILED with exit code 3" in shown
            and "task 3: Exited" in shown
            and "first words" not in shown
        )

    def test_a_run_that_was_stopped_is_no_failure_and_no_success(self, tmp_path: Path) -> None:
        run = RunFolder(tmp_path)
        run.events.write_text(EndEvent(time=1.0, step=4, outcome="stopped").model_dump_json() + "\n")
        outcome, shown = self.told(run, [self.status("RUNNING"), self.status("FAILED", "NonZeroExitCode", code=3)])
        assert outcome == 3
        assert "ended as FAILED" not in shown and "stopped" in shown

    def test_a_controller_that_is_away_for_a_while_does_not_end_the_wait(self, tmp_path: Path) -> None:
        away = SlurmError("Unable to contact slurm controller")
        outcome, shown = self.told(RunFolder(tmp_path), [self.status("RUNNING"), away, away, self.status("COMPLETED")])
        assert outcome == 0
        assert shown.count("Unable to contact") == 1

    def test_a_controller_that_stays_away_does(self, tmp_path: Path) -> None:
        outcome, _ = self.told(RunFolder(tmp_path), [SlurmError("Unable to contact slurm controller")] * 4, every=400)
        assert isinstance(outcome, SlurmError)

    def test_a_job_the_controller_has_forgotten_is_an_error_at_once(self, tmp_path: Path) -> None:
        outcome, _ = self.told(RunFolder(tmp_path), [SlurmError("slurm_load_jobs error: Invalid job id specified")])
        assert isinstance(outcome, SlurmError)

    def test_a_requeue_is_told(self, tmp_path: Path) -> None:
        answers: list[JobStatus | SlurmError] = [self.status("RUNNING", restarts=1), self.status("COMPLETED")]
        assert "job 7: running, restart 1" in self.told(RunFolder(tmp_path), answers)[1]
