"""Workspaces of cuDNN where no library can be asked: trees grown from its answers, and formulas found from them."""
