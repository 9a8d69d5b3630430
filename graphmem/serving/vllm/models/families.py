"""From a configuration to a model: which family it is, and its sizes."""
