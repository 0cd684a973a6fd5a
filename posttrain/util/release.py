"""The version of the package.

Here and not in `posttrain/__init__.py`, which Python does not run where the
current folder has one named `posttrain`, such as a clone of the repository.
"""

__version__ = '0.1.0'
