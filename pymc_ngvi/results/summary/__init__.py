"""Summaries: sentences and a table, as text and as HTML."""
