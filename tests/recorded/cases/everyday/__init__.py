"""Programs as colleagues write them, each a file that ends by itself within seconds on a card."""
