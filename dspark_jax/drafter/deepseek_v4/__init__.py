"""The DSpark drafter of DeepSeek-V4: stages of the target's own kind of layer."""
