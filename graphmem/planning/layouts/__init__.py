"""How a model's training is laid out over the cards of several machines: the space of layouts (:mod:`axes`), what each
needs at least (:mod:`bounds`) and sends (:mod:`communication`), which of them are captured (:mod:`search`), and the
frameworks' own configuration (:mod:`configuration`).
"""
