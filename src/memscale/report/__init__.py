"""What a person reads: tables and pictures for the terminal."""

from memscale._util.terminal import Column, Terminal, bar, table, timeline

__all__ = ["Column", "Terminal", "bar", "table", "timeline"]
