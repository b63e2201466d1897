"""Llama, Mistral, Qwen2 and Qwen3 decoders for steelyard."""
