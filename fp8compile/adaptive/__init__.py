"""Precision that follows the training: its settings, what it may change on which evidence, versions of a graph."""
