"""Wire types of the page's answers, one file per view."""
