"""The algorithms, estimators and baselines of papers as published, one folder per paper.

The library never imports them: ``capture.registered`` names them, and they are imported when a verb
is asked for one.
"""
