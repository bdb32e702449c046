"""The task `mail_search`: answer questions about a mailbox with tools that search it and read emails."""
