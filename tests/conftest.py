"""In CI no test is left out: what is skipped, expected to fail, or missing at collection, fails with its reason.

Elsewhere a test for which the machine lacks something is skipped, so a test only ever says `pytest.skip(reason)`.

Tests whose figures the documentation quotes write them as reports:

    pytest tests/multiprocess/test_parity.py --reports docs/reports
"""

import importlib.util
import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
IN_CI = bool(os.environ.get("CI"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--reports", type=Path, metavar="FOLDER", help="write the figures of tests to FOLDER/<name>.json")


@pytest.fixture(scope="module")
def report(request: pytest.FixtureRequest) -> Callable[[dict[str, Any]], None]:
    """Write the figures of a module to `<module without test_>.json`, if reports are asked for."""

    def write(figures: dict[str, Any]) -> None:
        folder = request.config.getoption("--reports")
        if folder is None:
            return
        spec = importlib.util.spec_from_file_location("reports", ROOT / "benchmarks" / "reports.py")
        assert spec and spec.loader
        reports = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(reports)
        name = request.path.stem.removeprefix("test_")
        command = f"pytest {request.path.relative_to(ROOT)}"
        reports.write_report(request.config.invocation_params.dir / folder / f"{name}.json", name, figures, command)

    return write


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if IN_CI and (report.skipped or hasattr(report, "wasxfail")):
        _fail(report, getattr(report, "wasxfail", None))
    return report


class _TellAtOnce:
    """Names a failed test when it fails: a run that is killed later has then said so."""

    def __init__(self, terminal: Any) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._terminal.ensure_newline()
            self._terminal.write_line(f"FAILED {report.nodeid}, {report.when}: {_first_line(report)}", red=True)


def _first_line(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longrepr).strip().partition("\n")[0][:300]


@pytest.hookimpl(trylast=True)  # once there is a terminal reporter
def pytest_configure(config: pytest.Config) -> None:
    """In CI, where output is read afterwards, failures are named at once."""
    if IN_CI and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_TellAtOnce(config.pluginmanager.getplugin("terminalreporter")))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, Any]:
    report = yield
    if IN_CI and report.skipped:
        _fail(report, None)
    return report


def _fail(report: pytest.TestReport | pytest.CollectReport, expected: str | None) -> None:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else expected or str(report.longrepr)
    report.outcome = "failed"
    report.longrepr = f"no test is left out in CI (CI is set in the environment): {reason}"
    if hasattr(report, "wasxfail"):
        del report.wasxfail  # pytest counts a report that has it as no failure
