"""What ranks do in the tests of several ranks, a file for each subject: importable by name, as other processes run it.

Experts that are spread over ranks have a package of their own, `experts_work`.
"""
