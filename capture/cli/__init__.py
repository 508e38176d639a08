"""The ``capture`` command. Nothing imports it."""
