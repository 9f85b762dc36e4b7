"""DeepSeek-V4: window and compressed attention over one shared key-value vector, mHC, MoE."""
