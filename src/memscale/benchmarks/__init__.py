"""The benchmark suite: known models, trained for a few steps, and the memory that takes.

`python -m memscale.benchmarks --help` says how to run it.
"""

from memscale.benchmarks.models import MODELS, BenchmarkModel, Published, find_model
from memscale.benchmarks.results import Results, Row
from memscale.benchmarks.run import MODES, Case, run_suite

__all__ = [
    "MODELS",
    "MODES",
    "BenchmarkModel",
    "Case",
    "Published",
    "Results",
    "Row",
    "find_model",
    "run_suite",
]
