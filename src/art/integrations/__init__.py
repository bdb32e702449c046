"""Agents of other people's frameworks as rollouts. Each file needs the extra of its name; nothing else imports them."""
