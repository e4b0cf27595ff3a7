"""The architectures: one file each holds a config reader, the weight names and a forward pass written in ops.

Does not know files, tokenizers, pages or backends: a model gets a config dict and the shapes and formats of weights.
"""
