"""The model families that the engine's start is followed for, by the ``model_type`` of their configuration."""
