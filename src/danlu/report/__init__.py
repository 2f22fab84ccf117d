"""A run's history for people: a page, a progress line, tables. Reads only a run folder; loads no torch."""

from danlu.report.progress_display import ProgressDisplay
from danlu.report.run_page import write_run_page
from danlu.report.run_tables import RunSummary, list_runs, summary

__all__ = ["ProgressDisplay", "RunSummary", "list_runs", "summary", "write_run_page"]
