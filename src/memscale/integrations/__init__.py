"""One small adapter per framework: what its loop needs beyond a wrapped model."""
