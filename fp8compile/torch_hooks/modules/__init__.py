"""Modules that Dynamo would leave to Python, or traces by themselves."""
