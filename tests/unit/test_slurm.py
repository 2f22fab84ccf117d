"""The Slurm launcher without a Slurm: scripts, host lists, topologies and ranks are pure."""

import re
import socket
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import typer
from pydantic import ValidationError

from danlu import scheduler
from danlu.cli import slurm_commands
from danlu.cli.slurm_commands import slurm_ended
from danlu.comm.store_token import read_token
from danlu.scheduler import (
    EXIT_STOPPED,
    JobStatus,
    RankMap,
    SlurmError,
    SlurmJob,
    Switch,
    expand_hostlist,
    find_free_port,
    get_job_status,
    get_node_address,
    order_nodes,
    parse_topology,
    ranks_per_node,
    read_job_id,
    read_ranks,
    read_topology,
    render_sbatch,
    slurm_task,
    submit_script,
    write_job_id,
    write_ranks,
)
from danlu.scheduler.slurm import SubmissionUncertainError, run_command
from danlu.scheduler.slurm_task import assign_ranks, resolve_task, wait_for_ranks_file
from danlu.spec import Chip, Cluster, Degrees, EndEvent, NetworkLevel, Plan, RankFailureEvent, RunFolder, StepEvent
from danlu.storage import run_lock

HOLDING_SHELL = 'exec 9<>"$0"/.lock; "$1" -c "$2" "$0"; echo taken; read -r _'
TAKE_FOR_PARENT = """
import os, sys
from pathlib import Path
from danlu.spec import RunFolder
from danlu.storage import run_lock
run_lock.acquire(RunFolder(Path(sys.argv[1])), job=31, descriptor=9, pid=os.getppid())
"""

JOB = SlurmJob(
    name="first run",
    workdir="/users/a b",
    run_folder="/data/50%/runs/first run",
    python="/venv/python",
    nodes=2,
    tasks_per_node=4,
)
RANKS = RankMap(job=7, restart=1, nodes=("n2", "n0"), tasks_per_node=4, store="10.0.0.2:20007", remark="test")


def said(stdout: str, stderr: str = "", code: int = 0):  # noqa: ANN201
    """A stand-in for Slurm's commands that keeps what it was asked."""
    asked: list[list[str]] = []

    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, code, stdout, stderr)

    return run, asked


class TestHostlist:
    @pytest.mark.parametrize(
        ("hostlist", "hosts"),
        [
            ("n[0-3,7],x01", ["n0", "n1", "n2", "n3", "n7", "x01"]),
            ("n[08-11]", ["n08", "n09", "n10", "n11"]),
            ("r[0-1]n[1-2]", ["r0n1", "r0n2", "r1n1", "r1n2"]),
            ("cn-3-[5,2]-ib", ["cn-3-5-ib", "cn-3-2-ib"]),
            ("a,b", ["a", "b"]),
            ("(null)", []),
            ("", []),
        ],
    )
    def test_it_is_written_out_in_its_own_order(self, hostlist: str, hosts: list[str]) -> None:
        assert list(expand_hostlist(hostlist)) == hosts

    @pytest.mark.parametrize("hostlist", ["n[0-3", "n0-3]", "n[3-1]", "n[a-c]", "n[]", "a,,b", "n[[0]]"])
    def test_what_slurm_would_not_write_is_an_error_that_names_it(self, hostlist: str) -> None:
        with pytest.raises(ValueError, match="host list"):
            expand_hostlist(hostlist)


class TestTopology:
    TWO_LEVELS = """\
SwitchName=sn0 Level=0 LinkSpeed=1 Nodes=n[0,2]
SwitchName=sn1 Level=0 LinkSpeed=1 Nodes=n[1,3]
SwitchName=spine Level=1 LinkSpeed=1 Nodes=n[0-3] Switches=sn[0-1]
"""

    def test_a_tree_is_read(self) -> None:
        leaf, _, spine = parse_topology(self.TWO_LEVELS)
        assert leaf == Switch(name="sn0", nodes=("n0", "n2"))
        assert spine.switches == ("sn0", "sn1")

    def test_an_unknown_line_is_named(self) -> None:
        with pytest.raises(ValueError, match="BlockName=b1"):
            parse_topology("BlockName=b1 BlockIndex=0 Nodes=n[0-3]\n")

    def test_neighbours_in_rank_order_share_the_lowest_switch(self) -> None:
        order = order_nodes(["n0", "n1", "n2", "n3"], parse_topology(self.TWO_LEVELS), first="n0")
        assert order.nodes == ("n0", "n2", "n1", "n3")
        assert "follow the topology; leaf switches: 2, nodes on them: 4 of 4" in order.remark

    def test_the_batch_host_and_its_switch_come_first(self) -> None:
        order = order_nodes(["n0", "n1", "n2", "n3"], parse_topology(self.TWO_LEVELS), first="n3")
        assert order.nodes == ("n3", "n1", "n0", "n2")

    def test_nodes_outside_the_job_are_left_out(self) -> None:
        order = order_nodes(["n1", "n2", "n3"], parse_topology(self.TWO_LEVELS), first="n2")
        assert order.nodes == ("n2", "n1", "n3")

    def test_any_depth_crosses_every_switch_as_rarely_as_possible(self) -> None:
        """64 nodes dealt out like cards over a binary tree of six levels: a switch's nodes stay together."""
        names = [f"n{number}" for number in range(64)]
        switches = [Switch(name=f"s0.{leaf}", nodes=tuple(names[leaf::32])) for leaf in range(32)]
        for level in range(1, 6):
            for here in range(32 >> level):
                children = [switch for switch in switches if switch.name in _children(level, here)]
                nodes = tuple(sorted(node for child in children for node in child.nodes))
                below = tuple(child.name for child in children)
                switches.append(Switch(name=f"s{level}.{here}", nodes=nodes, switches=below))
        order = order_nodes(names, switches, first="n37").nodes
        assert order[0] == "n37" and sorted(order) == sorted(names)
        for switch in switches:
            places = sorted(order.index(node) for node in switch.nodes)
            assert all(after - before == 1 for before, after in pairwise(places)), switch.name

    def test_without_topology_slurms_order_stands_and_is_said(self) -> None:
        order = order_nodes(["n0", "n1", "n2"], (), first="n0")
        assert order.nodes == ("n0", "n1", "n2")
        assert "Slurm has no topology" in order.remark

    def test_nodes_on_no_switch_come_last_and_are_named(self) -> None:
        order = order_nodes(["a9", "n0", "n1", "n2"], parse_topology(self.TWO_LEVELS), first="n0")
        assert order.nodes == ("n0", "n2", "n1", "a9")
        assert "a9 are on no switch" in order.remark

    def test_rank_0_is_on_the_batch_host_even_if_it_hangs_on_no_switch(self) -> None:
        order = order_nodes(["n0", "a9", "n1", "n2"], parse_topology(self.TWO_LEVELS), first="a9")
        assert order.nodes == ("a9", "n0", "n2", "n1")

    def test_a_node_on_two_switches_has_one_rank(self) -> None:
        switches = (Switch(name="a", nodes=("n0", "n1")), Switch(name="b", nodes=("n1", "n2")))
        assert order_nodes(["n0", "n1", "n2"], switches, first="n0").nodes == ("n0", "n1", "n2")

    def test_a_batch_host_outside_the_job_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="must be one of n0, but is n9"):
            order_nodes(["n0"], (), first="n9")


def _children(level: int, here: int) -> tuple[str, str]:
    return f"s{level - 1}.{2 * here}", f"s{level - 1}.{2 * here + 1}"


class TestScript:
    def test_it_says_what_was_asked_and_quotes_what_a_shell_would_split(self) -> None:
        script = render_sbatch(
            JOB.model_copy(update={"time": "1-00:00:00", "partition": "low", "extra_options": ("--constraint=x",)})
        )
        assert script.startswith("#!/bin/bash\n#SBATCH --job-name=first-run\n#SBATCH --nodes=2\n")
        for line in ("--ntasks-per-node=4", "--requeue", "--time=1-00:00:00", "--partition=low", "--constraint=x"):
            assert f"#SBATCH {line}\n" in script
        assert "#SBATCH --account" not in script
        assert "#SBATCH --output='/data/50%%/runs/first run/logs/job.log'\n" in script
        assert "\ncd '/users/a b'\n" in script
        assert "/venv/python -m danlu slurm-ranks '/data/50%/runs/first run' --lock 9\n" in script
        assert "/venv/python -m danlu slurm-task '/data/50%/runs/first run' || code=$?\n" in script
        assert "--ntasks=8" in script

    def test_it_is_a_script(self) -> None:
        subprocess.run(["bash", "-n"], input=render_sbatch(JOB), text=True, check=True)

    @pytest.mark.parametrize(
        ("option", "complaint"),
        [
            ("constraint=x", "must be like"),
            ("--nodes=4", "own --nodes"),
            ("-N 4", "own --nodes"),
            ("-x\nrm", "must be"),
        ],
    )
    def test_an_option_that_is_none_or_is_ours_is_refused(self, option: str, complaint: str) -> None:
        with pytest.raises(ValidationError, match=complaint):
            SlurmJob(**(JOB.model_dump() | {"extra_options": (option,)}))


class TestFit:
    EIGHT = Plan(degrees=Degrees(shard=4, tp=2))
    CLUSTER = Cluster(
        name="lab",
        chip=Chip(name="c", kind="cpu", memory=1, memory_bandwidth=1.0, peak={"fp32": 1.0}),
        levels=(
            NetworkLevel(name="node", fanout=4, bandwidth=1.0, latency=0.0),
            NetworkLevel(name="net", fanout=3, bandwidth=1.0, latency=0.0),
        ),
    )

    @pytest.mark.parametrize(
        ("nodes", "asked", "plan", "cluster", "ranks"),
        [
            (2, None, None, None, 1),
            (2, 4, None, None, 4),
            (2, None, EIGHT, None, 4),
            (2, 4, EIGHT, None, 4),
            (3, None, None, CLUSTER, 4),
            (2, 2, None, CLUSTER, 2),
            (2, None, EIGHT, CLUSTER, 4),
        ],
    )
    def test_ranks_of_a_node(
        self, nodes: int, asked: int | None, plan: Plan | None, cluster: Cluster | None, ranks: int
    ) -> None:
        assert ranks_per_node(nodes, asked, plan, cluster) == ranks

    @pytest.mark.parametrize(
        ("nodes", "asked", "plan", "cluster", "complaint"),
        [
            (3, None, EIGHT, None, "8 ranks, which do not divide evenly over 3 nodes: --nodes 2 or --nodes 4 would"),
            (9, None, EIGHT, None, "do not divide evenly over 9 nodes: --nodes 8 would fit"),
            (1, 4, EIGHT, None, "1 nodes × 4 ranks are 4: --nodes 2 or --ranks-per-node 8 would fit"),
            (3, 3, EIGHT, None, "3 nodes × 3 ranks are 9: a plan of 9 ranks would fit"),
            (1, None, EIGHT, CLUSTER, "node of lab has 4 chips, but gets 8 ranks"),
            (4, None, None, CLUSTER, "lab has 3 nodes, but 4 are requested: --nodes 3 would fit"),
        ],
    )
    def test_what_does_not_fit_is_told_with_the_number_that_would(
        self, nodes: int, asked: int | None, plan: Plan | None, cluster: Cluster | None, complaint: str
    ) -> None:
        with pytest.raises(ValueError, match=re.escape(complaint)):
            ranks_per_node(nodes, asked, plan, cluster)


class TestCommands:
    def test_submit_returns_the_number_also_with_a_cluster_behind_it(self) -> None:
        run, asked = said("4711;cluster\n")
        assert submit_script(Path("job.sbatch"), run) == 4711
        assert asked == [["sbatch", "--parsable", "job.sbatch"]]

    def test_a_refusal_is_told_in_slurms_own_words(self) -> None:
        run, _ = said("", "sbatch: error: invalid partition specified: nope\n", code=1)
        with pytest.raises(SlurmError, match="invalid partition specified: nope"):
            submit_script(Path("job.sbatch"), run)

    def test_an_answer_without_a_number_is_an_error(self) -> None:
        with pytest.raises(SlurmError, match="job number"):
            submit_script(Path("job.sbatch"), said("queued, good luck\n")[0])
        lost = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation\n"
        with pytest.raises(SubmissionUncertainError, match="Socket timed out"):
            submit_script(Path("job.sbatch"), said("", lost, code=1)[0])

    def test_a_command_that_is_not_installed_is_a_clear_error(self) -> None:
        with pytest.raises(SlurmError, match="`sbatch-of-nowhere` is not found"):
            run_command(["sbatch-of-nowhere"])

    def test_the_state_of_a_job(self) -> None:
        line = "JobId=12 JobName=x JobState=FAILED Reason=NonZeroExitCode Restarts=2 ExitCode=3:0 NodeList=n[0-1]\n"
        assert get_job_status(12, said(line)[0]) == JobStatus(
            job=12, state="FAILED", reason="NonZeroExitCode", exit_code=3, signal=0, restarts=2
        )

    @pytest.mark.parametrize(
        ("state", "code", "signal", "over", "outcome"),
        [
            ("COMPLETED", 0, 0, True, 0),
            ("RUNNING", 0, 0, False, 1),
            ("COMPLETING", 0, 0, False, 1),
            ("FAILED", 3, 0, True, 3),
            ("CANCELLED", 0, 15, True, 143),
            ("TIMEOUT", 0, 0, True, 1),
        ],
    )
    def test_only_a_completed_job_is_a_success(
        self, state: str, code: int, signal: int, over: bool, outcome: int
    ) -> None:
        job = JobStatus(job=1, state=state, reason="", exit_code=code, signal=signal, restarts=0)
        assert (job.is_finished, job.shell_exit_code) == (over, outcome)

    def test_the_two_questions_a_job_asks(self) -> None:
        assert read_topology(said("", "scontrol: error: No topology information available\n")[0]) == ()
        assert get_node_address("n0", said("NodeName=n0 Arch=x NodeAddr=10.1.2.3 NodeHostName=n0\n")[0]) == "10.1.2.3"
        with pytest.raises(SlurmError, match="NodeAddr"):
            get_node_address("n0", said("NodeName=n0\n")[0])

    def test_to_stop_is_to_signal_the_tasks_and_not_the_script(self) -> None:
        run, asked = said("")
        scheduler.request_stop(12, run)
        scheduler.cancel_job(13, run)
        assert asked == [["scancel", "--signal=TERM", "12"], ["scancel", "13"]]

    def test_the_job_of_a_run_is_found_again(self, tmp_path: Path) -> None:
        assert read_job_id(tmp_path) is None
        write_job_id(tmp_path, 77)
        assert read_job_id(tmp_path) == 77
        (tmp_path / "job.json").write_text("{}")
        with pytest.raises(ValueError, match="is not a file that `danlu launch` wrote"):
            read_job_id(tmp_path)


class TestRanks:
    TASK = {  # noqa: RUF012
        "SLURM_JOB_ID": "7",
        "SLURM_RESTART_COUNT": "1",
        "SLURMD_NODENAME": "n0",
        "SLURM_LOCALID": "3",
        "SLURM_NTASKS": "8",
        "SLURM_CPUS_ON_NODE": "8",
    }

    def test_the_file_round_trips_and_nothing_else_is_left(self, tmp_path: Path) -> None:
        write_ranks(tmp_path, RANKS.model_copy(update={"restart": 0}))
        write_ranks(tmp_path, RANKS)
        assert read_ranks(tmp_path) == RANKS
        assert sorted(file.name for file in tmp_path.iterdir()) == [RANKS.token_file, "ranks.json"]
        assert read_token(tmp_path / RANKS.token_file)

    def test_a_foreign_file_is_an_error(self, tmp_path: Path) -> None:
        (tmp_path / "ranks.json").write_text("{}")
        with pytest.raises(ValueError, match="is not a file that `danlu slurm-ranks` wrote"):
            read_ranks(tmp_path)

    def test_every_rank_is_held_once_in_the_order_of_the_nodes(self) -> None:
        assert [RANKS.rank_of(node, local) for node in ("n2", "n0") for local in range(4)] == list(range(8))

    def test_a_foreign_node_or_task_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="node n9"):
            RANKS.rank_of("n9", 0)
        with pytest.raises(ValueError, match="number 4"):
            RANKS.rank_of("n0", 4)

    def test_a_task_finds_its_rank_and_its_threads(self) -> None:
        task = resolve_task(RANKS, self.TASK)
        assert (task.rank, task.world_size, task.local_rank, task.rdzv_endpoint, task.threads) == (
            7,
            8,
            3,
            "10.0.0.2:20007",
            2,
        )
        assert resolve_task(RANKS, {**self.TASK, "SLURM_CPUS_PER_TASK": "6"}).threads == 6
        assert resolve_task(RANKS, {**self.TASK, "SLURM_CPUS_ON_NODE": "1"}).threads == 1

    @pytest.mark.parametrize(
        ("change", "complaint"),
        [
            ({"SLURM_NTASKS": "4"}, "must start 8 tasks"),
            ({"SLURM_LOCALID": ""}, "SLURM_LOCALID must be set"),
            ({"SLURM_LOCALID": "x"}, "must be a number"),
        ],
    )
    def test_an_environment_that_does_not_fit_is_an_error(self, change: dict[str, str], complaint: str) -> None:
        with pytest.raises(ValueError, match=complaint):
            resolve_task(RANKS, {**self.TASK, **change})

    def test_a_task_waits_for_the_file_of_its_own_start(self, tmp_path: Path) -> None:
        """A requeued job on a network file system: the first looks show the file of the earlier start."""
        write_ranks(tmp_path, RANKS.model_copy(update={"restart": 0}))
        slept: list[float] = []

        def sleep(seconds: float) -> None:
            slept.append(seconds)
            if len(slept) == 3:
                write_ranks(tmp_path, RANKS)

        assert wait_for_ranks_file(tmp_path, self.TASK, clock=lambda: sum(slept), sleep=sleep) == RANKS
        assert len(slept) == 3

    def test_a_file_that_never_comes_is_an_error_that_says_what_was_seen(self, tmp_path: Path) -> None:
        slept: list[float] = []
        with pytest.raises(ValueError, match="must be of job 7, restart 1, but does not exist after 5 s"):
            wait_for_ranks_file(tmp_path, self.TASK, timeout=5, clock=lambda: sum(slept), sleep=slept.append)
        assert sum(slept) == 5

    @pytest.mark.parametrize(
        ("text", "nodes", "remark"),
        [
            (TestTopology.TWO_LEVELS, ("n3", "n1", "n0", "n2"), "follow the topology"),
            ("", ("n3", "n0", "n1", "n2"), "Slurm has no topology"),
            ("BlockName=b1 Nodes=n[0-3]", ("n3", "n0", "n1", "n2"), "was not understood: "),
        ],
    )
    def test_the_batch_host_asks_twice_and_writes_the_rest_from_its_environment(
        self, monkeypatch: pytest.MonkeyPatch, text: str, nodes: tuple[str, ...], remark: str
    ) -> None:
        asked = []
        monkeypatch.setattr(slurm_task, "read_topology", lambda: asked.append("topology") or parse_topology(text))
        monkeypatch.setattr(slurm_task, "get_node_address", lambda node: asked.append(node) or "10.0.0.2")
        ranks = assign_ranks(
            {
                "SLURM_JOB_ID": "7",
                "SLURMD_NODENAME": "n3",
                "SLURM_JOB_NODELIST": "n[0-3]",
                "SLURM_NTASKS_PER_NODE": "4",
            }
        )
        assert asked == ["topology", "n3"]
        assert (ranks.job, ranks.restart, ranks.nodes, ranks.tasks_per_node) == (7, 0, nodes, 4)
        assert ranks.store.startswith("10.0.0.2:2") and remark in ranks.remark

    def test_a_failure_is_written_behind_the_last_step(self, tmp_path: Path) -> None:
        run = RunFolder(tmp_path)
        figures = {
            "time": 1.0,
            "loss": 2.0,
            "norm": 1.0,
            "learning_rate": 0.1,
            "tokens": 1,
            "seconds": 1.0,
            "memory": 1,
        }
        run.events.write_text("".join(StepEvent(step=step, **figures).model_dump_json() + "\n" for step in (1, 2)))
        with pytest.raises(typer.Exit) as ending:
            slurm_ended(tmp_path, 7)
        assert ending.value.exit_code == 7
        *_, end = run.read_events()
        assert isinstance(end, EndEvent) and (end.step, end.outcome) == (2, "failed")
        assert "exit code 7" in end.message

    def test_a_rank_that_reported_its_failure_is_named_at_the_end(self, tmp_path: Path) -> None:
        run = RunFolder(tmp_path)
        run.rank_events(3).parent.mkdir()
        with run_lock.acquire(run, job=12):
            for rank, after, words in ((3, 1.0, "loss nan"), (1, 2.0, "peer is gone"), (2, -99.0, "an earlier start")):
                when = time.time() + after
                failure = RankFailureEvent(
                    time=when, rank=rank, step=4, error="X", message=words, explained=True, host="n", pid=1
                )
                run.rank_events(rank).write_text(failure.model_dump_json() + "\n")
            with pytest.raises(typer.Exit):
                slurm_ended(tmp_path, 1)
        *_, end = run.read_events()
        assert isinstance(end, EndEvent) and end.message.startswith("rank 3 failed: loss nan; job ")

    def test_a_job_whose_run_was_stopped_ends_as_train_does_and_an_older_stop_is_not_its_own(
        self, tmp_path: Path
    ) -> None:
        run = RunFolder(tmp_path)
        run.events.write_text(EndEvent(time=1.0, step=4, outcome="stopped").model_dump_json() + "\n")
        with run_lock.acquire(run, job=12):
            slurm_ended(tmp_path, 0)  # of an earlier start, and this one ended well without a word
            with run.events.open("a") as events:
                events.write(EndEvent(time=time.time(), step=9, outcome="stopped").model_dump_json() + "\n")
            for code in (0, 143):  # a cancelled job's tasks end by a signal, after they have saved
                with pytest.raises(typer.Exit) as ending:
                    slurm_ended(tmp_path, code)
                assert ending.value.exit_code == EXIT_STOPPED
        assert sum(1 for _ in run.read_events()) == 2, "nothing was added"

    def test_the_jobs_script_holds_the_lock_and_a_live_run_is_left_alone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(slurm_commands, "_LOCK_TIMEOUT", 0.1)
        monkeypatch.setenv("SLURM_JOB_ID", "31")
        monkeypatch.setattr(slurm_commands, "assign_ranks", lambda environment: pytest.fail("the lock comes first"))
        run = RunFolder(tmp_path)
        with run_lock.acquire(run), pytest.raises(typer.Exit):
            slurm_commands.slurm_ranks(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]
        shell = subprocess.Popen(
            ["bash", "-c", HOLDING_SHELL, str(tmp_path), sys.executable, TAKE_FOR_PARENT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert shell.stdin and shell.stdout and shell.stdout.readline() == "taken\n"
        holder = run_lock.read_holder(run)
        assert holder is not None and (holder.pid, holder.job, holder.is_alive) == (shell.pid, 31, True)
        shell.communicate("\n")
        assert run_lock.read_holder(run) is None

    def test_a_port_in_use_is_passed_over(self) -> None:
        with socket.socket() as holder:
            port = find_free_port(job=123)
            holder.bind(("", port))
            holder.listen()
            assert find_free_port(job=123) > port


def test_the_room_loads_without_torch() -> None:
    code = "import sys, danlu.scheduler, danlu.cli.slurm_commands, danlu.cli.launch; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
