"""The generator of realistic mailboxes with questions."""
