"""The engines that sample completions: the embedded one in torch, and one on vLLM servers."""
