"""Plans as tables of text and HTML."""
