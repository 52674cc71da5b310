"""Retrieval, zero-shot classification and the report, on features already fetched to the host."""

from disco_jax.evaluation.report import write_report
from disco_jax.evaluation.retrieval import retrieval_metrics, top_images
from disco_jax.evaluation.zero_shot import class_embeddings, zero_shot_metrics

__all__ = ["class_embeddings", "retrieval_metrics", "top_images", "write_report", "zero_shot_metrics"]
