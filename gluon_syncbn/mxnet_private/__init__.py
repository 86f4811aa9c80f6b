"""Access to MXNet beyond its public interface: private names, C calls, patches.

Every private name was checked on MXNet 1.6.0, 1.7.0.post2, 1.9.1 and 2.0.0b1. Before
you support another version, read MXNet's code for each name.
"""
