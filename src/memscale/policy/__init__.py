"""The learned policy: `Config(auto_policy=True)` lets it choose a strategy, which the planner expands per layer."""
