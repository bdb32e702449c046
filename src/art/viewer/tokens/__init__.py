"""Reads what is known of each token: from the record of exchanges, and from the files that training steps leave.

exchanges.py         recorded requests and answers -> token paths of a rollout
rollout_training.py  plan records and token files -> what a step did with a rollout
texts.py             token ids -> texts, with the model's tokenizer where this machine has it
rollout_tokens.py    all of it for one rollout
nodes.py, tree.py    the prefix tree of a step
"""
