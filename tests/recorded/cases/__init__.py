"""Cases that were recorded one by one: what they run, and nothing of who records."""
