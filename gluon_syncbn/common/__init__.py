"""Shared helpers: checks of arguments and versions, nested lists, shares of rows."""
