"""Plans of convolutions, asked from the user's own cuDNN instead of predicted. Nothing here knows torch or a trace.

``library`` finds the library and asks; ``worker`` is the process that loads it, so that nothing of it reaches the
caller's; ``plans`` chooses among cuDNN's plans as PyTorch does; ``descriptors`` are cuDNN's backend descriptors,
``card`` the description that stands for the device, and ``driver`` the stand-in for a driver that is not installed.
"""
