"""What a technique is to the executor, and what techniques are written with."""
