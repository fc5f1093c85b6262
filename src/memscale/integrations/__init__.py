"""One small adapter a framework: what its loop needs beyond a wrapped model."""
