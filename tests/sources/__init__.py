"""Every kind of input, damaged ones included."""
