"""CAPTURE as published, and what it compares itself with: its enumeration, its predictor, mCAP, and
plans that look at no memory.

Source: Dreuning, Verstoep, Bal and van Nieuwpoort 2023 (CAPTURE); READINGS.md, CAPTURE.
"""
