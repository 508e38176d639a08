"""OSDP as published: its cost model, its search, and its models from their sizes alone.

Source: Jiang et al. 2023 (OSDP); READINGS.md, OSDP.
"""
