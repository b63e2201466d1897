"""Qwen2-MoE, Qwen3-MoE and Mixtral decoders for steelyard."""
