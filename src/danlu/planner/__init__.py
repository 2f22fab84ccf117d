"""Finds the fastest layout that fits, with its time and memory, and why other layouts lose. No torch."""

from danlu.planner.pricing import PricedPlan
from danlu.planner.request import PlanRequest, PlanRequestError, SearchConstraints, parse_constraints
from danlu.planner.search import SearchResult, price_plan, search, search_exhaustively

__all__ = [
    "PlanRequest",
    "PlanRequestError",
    "PricedPlan",
    "SearchConstraints",
    "SearchResult",
    "parse_constraints",
    "price_plan",
    "search",
    "search_exhaustively",
]
