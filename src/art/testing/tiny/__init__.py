"""The tiny model, a causal language model of about 0.1 M parameters: tokenizer, template, weights, warm start."""
