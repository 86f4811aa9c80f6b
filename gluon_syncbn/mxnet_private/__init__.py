"""Everything that MXNet's public interface lacks: private names, C calls, patches.

It must not know native code, layers or devices. Each name was checked on MXNet 1.6.0,
1.7.0.post2, 1.9.1 and 2.0.0b1, and where they differ `IS_GLUON_2` tells; the text
beside it says why nothing public serves. For another version, read MXNet's code of
what stands here.
"""
