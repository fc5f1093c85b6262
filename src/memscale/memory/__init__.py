"""Byte accounting: the tracker, models of allocators, and the memory of a process."""
