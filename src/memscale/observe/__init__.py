"""What a plan does while a model trains: counted (`counters`), timed (`clocks`), read (`report`) and logged (`log`)."""
