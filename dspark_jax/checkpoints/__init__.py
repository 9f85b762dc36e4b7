"""Reading and writing weights: safetensors, GGUF and the drafter dialects."""
