"""Small things that every wing uses: checks of arguments, nested lists, shares of rows.

It must not know native code, layers or devices.
"""
