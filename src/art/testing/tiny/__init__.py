"""A causal language model of about 0.1 M parameters, made on the spot: tokenizer, template, weights, warm start."""
