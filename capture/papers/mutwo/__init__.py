"""mu-TWO's algorithms A to H, as printed and as corrected, in plain Python.

    profiler    A, what runs measure of a graph           graph    Tables A and B, by analysis
    policy      B, swap or recompute, until it fits       overhead C and D, what either costs
    lineage     E and F, sources of recomputations        memory   G, bytes of a schedule
    engine      H, its events on three streams            step     the same in our language
    schedule    the state that they share                 readings where print and correction differ
    sub_arrays  graphs from the data of our own search    partitions the fastest of them

Source: Purandare et al. 2023 (mu-TWO), 4 and appendix A; READINGS.md, mu-TWO.
"""
