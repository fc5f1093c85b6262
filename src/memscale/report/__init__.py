"""What a person or a dashboard reads: tables for the terminal, exporters of a model's report."""

from memscale._util.terminal import Column, Terminal, table

__all__ = ["Column", "Terminal", "table"]
