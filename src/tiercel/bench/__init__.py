"""Measures this engine, beside its peers and the machine's limits, and writes what was measured as rows.

Knows how to measure; what is measured is in `benchmarks/cases`, and what came out in `benchmarks/results`. Knows no
peer's engine: a peer is a process that speaks lines of JSON (`peers`).
"""
