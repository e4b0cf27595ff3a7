"""Weight formats: how a tensor's bytes become float32 and back.

It knows the layouts that files use. It does not know files, models, kernels or the packed layouts kernels want.
"""
