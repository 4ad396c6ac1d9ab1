"""The decisions of a compilation as plain data: rows, JSON, the plans of this process, and plans handed back."""
