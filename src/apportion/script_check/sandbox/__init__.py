"""Runs the processes of a script so that none of the user's files changes and nothing leaves the machine.

Where the kernel allows it the script runs in namespaces of its own (``namespaces.py``, ``mounts.py``), elsewhere in a
copy of its folder (``mirror.py``, ``guard.py``, Landlock in ``linux.py``). In both, ``leader.py`` starts its ranks.
"""
