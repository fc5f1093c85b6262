"""What a plan does while a model trains: counted (`meter`), read (`report`), and passed on to those who watch.

| file | what |
|---|---|
| ``meter.py``, ``clocks.py``, ``peaks.py`` | counts, times and peaks of memory, while the model trains |
| ``recomputing.py``, ``state.py`` | what techniques hold to tell the meter of layers and of optimizer state |
| ``report.py`` | all of it at one moment, as data and as a table |
| ``prometheus.py``, ``server.py``, ``metrics.py`` | the same as text for Prometheus, and the port that serves it |
| ``scalars.py`` | the same for a TensorBoard writer |
| ``dump.py`` | the same, with plan and peak, in a file when memory has run out for good |
"""
