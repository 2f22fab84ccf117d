"""Which layout, how fast, how many bytes, and why not the others: answered before anything starts. No torch."""

from danlu.planner.question import Limits, Question, QuestionError, limits
from danlu.planner.search import Answer, Choice, exhaustive, price, search

__all__ = ["Answer", "Choice", "Limits", "Question", "QuestionError", "exhaustive", "limits", "price", "search"]
