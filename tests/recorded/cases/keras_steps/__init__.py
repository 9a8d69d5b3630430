"""Keras models whose training steps TensorFlow's CUDA build ran on the stub driver."""
