"""Training of draft models: texts that the target writes, what it computes of them, and a network that foretells it.

Knows the engine through `llm` and `boot`. torch is in the extra `train`; only the modules that say so import it, and
nothing outside this package imports those. It serves nothing: what it makes is a folder that the loaders read.
"""
