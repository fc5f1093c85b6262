"""The planner: from a model, a batch, a device and a Config to a plan, by rules, the same every time."""
