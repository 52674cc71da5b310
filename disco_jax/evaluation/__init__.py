"""Retrieval, zero-shot classification and the report of a run."""
