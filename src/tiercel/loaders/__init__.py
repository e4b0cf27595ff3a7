"""Model files to named tensors: GGUF and safetensors, memory-mapped, every range checked before it is touched.

It gives tensors their Hugging Face names and a Hugging Face style configuration. It does not know what a model
computes, how a tokenizer is built, or where files are downloaded from. Start at `checkpoint.open_checkpoint`.
"""
