"""Harmony as released and evaluated: its estimator, and what it is compared with.

    estimate, items    the released scheduler's events on our simulator
    baselines          steps of other systems, from the same profiles and links
    swapping           data and pipeline parallelism over virtual memory, simulated
    virtual_memory     the manager of a device that knows only this device
    swapped_step       data parallelism over virtual memory as instructions
    swapped_run        ... run on the same programs and meters as plans of packs

Source: Li et al. 2022 (Harmony); READINGS.md, Harmony.
"""
