"""Sharded data parallelism per operator: operators, devices and cost models. Never loads JAX; the searches are in ``recommender.osdp``.

Source: Jiang, Fu, Miao, Nie and Cui, *OSDP: Optimal Sharded Data Parallel for Distributed Deep Learning*, IJCAI 2023 ("the paper" here).
Where it is doubtful, ``capture/READINGS.md`` says what was read.
"""
