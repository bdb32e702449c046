"""Reads what is known of each token: from the record of exchanges, and from the files that training steps leave."""
