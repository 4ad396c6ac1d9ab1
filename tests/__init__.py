"""Tests, in the rooms of the code; `support/` has what they share."""
