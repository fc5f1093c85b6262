"""What a plan does while a model trains: counted (`counters`), read (`report`) and logged (`log`)."""
