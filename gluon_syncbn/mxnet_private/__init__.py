"""Everything that MXNet's public interface lacks: private names, C calls, patches.

It must not know native code, layers or devices. Each name was checked on MXNet 1.6.0,
1.7.0.post2 and 1.9.1; the text beside it says why nothing public serves. For another
version, read MXNet's code of what stands here.
"""
