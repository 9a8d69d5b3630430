"""Training loops compared with the CUDA build: optimizers and what people do around them."""
