"""`LLM` and `AsyncLLM`: the engine inside your own process, under vLLM's names. Knows no HTTP."""
