"""A plan for people: its facts (``data``), figures, words, and one page that needs no network."""
