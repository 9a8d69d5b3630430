"""graphmem where others' programs ask: notebooks, pytest, Hugging Face's Trainer, Lightning, a training loop."""
