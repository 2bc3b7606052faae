"""Static checks of the project: each function takes a tree and returns its findings as text.

They parse, they import nothing of the package, and they need no torch and no build.
"""
