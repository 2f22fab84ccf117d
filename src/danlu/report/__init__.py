"""What a run did, for people: a page, a live line, tables. Reads a run folder and nothing else; loads no torch."""

from danlu.report.live import Live, summary
from danlu.report.page import write_page
from danlu.report.runs import RunSummary, list_runs

__all__ = ["Live", "RunSummary", "list_runs", "summary", "write_page"]
