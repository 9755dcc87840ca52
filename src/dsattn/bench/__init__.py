"""Benchmarks: every operation checked against fp64, then timed beside whatever peer is installed.

    cases.py      what is benchmarked: model shapes, key patterns, operands
    patterns.py   which keys a row selects: uniform, recent, or as a trained model was seen to
    oracle.py     the formulas in plain torch on a few rows, and the error in units of plain torch's own
    timing.py     CUDA events over rotating inputs; the wall clock on a CPU
    trials.py     an operation on its operands: how to run, check and count it
    layer.py      one whole DSA layer, forward and backward
    peers.py      how a peer runs the same operation on the same operands
    agreement.py  whether its result is that of the same work
    run.py        check, time, compare: a trial becomes a record
    recall.py     what a low precision of selection costs and saves
    records.py    a record, the machine it was made on, files of JSON lines
    plots.py      pictures of records; the length at which sparse attention overtakes dense

`dsattn bench` is the command. Letters: as in `ops/`.
"""
